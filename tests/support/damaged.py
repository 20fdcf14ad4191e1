"""Files with damage, for the tests of what reads them."""

from __future__ import annotations

import random

ODD = (b"1e999", b"-1", b"null", b"[[[[", b'"', b"\\ud800", b"9" * 30, b"NaN", b"{}")


def changed(random_: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, cut, doubled or put elsewhere."""
    made = bytearray(data)
    for _ in range(random_.randrange(1, 6)):
        at = random_.randrange(len(made) or 1)
        end = min(len(made), at + random_.choice((1, 2, 8, 40, 400)))
        what = random_.randrange(5)
        if what == 0:
            made[at:end] = random_.randbytes(end - at)
        elif what == 1:
            del made[at:end]
        elif what == 2:
            made[at:at] = made[at:end] * random_.randrange(1, 4)
        elif what == 3:
            made[at:end] = random_.choice(ODD)
        elif made:
            made[at % len(made)] ^= 1 << random_.randrange(8)
    return bytes(made)
