"""The parts of training that move bytes, each against what bounds it.

    python bench/training_parts.py --optimizer            AdamW states on disk, CPU, 144 matrices of 4 MiB
    python bench/training_parts.py --optimizer --tiny     the same with 8 of 256 KiB, to see that it works

``of the disk`` is the time of a raw O_DIRECT read and write of the same bytes over that of a step, in the fastest of
four ways (in turn or at once, one or two requests in flight), from memory with huge pages; rounds are interleaved,
numbers are medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import _harness as harness
import _training_optimizer as optimizer
from brim.techniques.optimizer_offload.state_blocks import BLOCK_BYTES
from brim.units import format_bytes, parse_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", action="store_true", help="optimizer states on disk")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=parse_bytes, default=BLOCK_BYTES, help="parameters that are stepped at once")
    parser.add_argument(
        "--buffer", type=parse_bytes, help="RAM that states pass through; default: three blocks' worth"
    )
    parser.add_argument("--directory", type=Path, default=Path(os.environ.get("BRIM_SCRATCH", tempfile.gettempdir())))
    parser.add_argument("--output", type=Path, help="write the JSON here")
    options = parser.parse_args()
    if not options.optimizer:
        parser.error("name a part: --optimizer")
    size = optimizer.TINY if options.tiny else optimizer.FULL
    found = optimizer.measure(
        size, options.directory, rounds=options.rounds, block_bytes=options.block, buffer_bytes=options.buffer
    )
    print(
        f"states on disk      {format_bytes(found['state_bytes'])}, through {format_bytes(found['ram_bytes'])} of RAM"
    )
    print(f"written per step    {format_bytes(found['written_bytes_per_step'])}")
    print(f"a step              {found['step_s']:.3f} s, {found['step_bytes_per_s'] / 1e9:.2f} GB/s both ways")
    print(f"the disk alone      {found['raw_s']:.3f} s, {found['raw_bytes_per_s'] / 1e9:.2f} GB/s both ways")
    print(f"the update alone    {found['resident_step_s']:.3f} s")
    print(f"of the disk         {found['of_the_disk']:.2f}")
    print(f"of the bound        {found['of_the_bound']:.2f} (the slower of disk and update)")
    told = f"both at once without waiting: {found['beside_s']:.3f} s"
    print(f"of the overlap      {found['of_the_overlap']:.2f} ({told})")
    if options.output:
        harness.write_json(options.output, found)


if __name__ == "__main__":
    main()
