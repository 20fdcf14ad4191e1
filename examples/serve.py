"""`python examples/serve.py MODEL --ram 3GiB`: a model within a memory budget, in the server of `transformers serve`.

It needs `pip install "transformers[serving]"`. The server answers /v1/chat/completions, /v1/completions and
/v1/responses, one request at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import brim
from brim.estimation.step_memory import Inputs


def application(name: str, model: Any, tokenizer: Any) -> Any:
    """The server's application for a model that is loaded already; it answers for no other one."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager, TimedModel
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerationState

    manager, state = ModelManager(), GenerationState()
    manager.loaded_models[manager.process_model_name(name)] = TimedModel(model, -1, tokenizer)  # -1: it stays
    manager.force_model = name
    chat, completion, response, decision = (
        kind(model_manager=manager, generation_state=state)
        for kind in (ChatCompletionHandler, CompletionHandler, ResponseHandler, SystemOneHandler)
    )
    return build_server(manager, chat, completion, response, TranscriptionHandler(manager, state), decision, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder or a hub id")
    parser.add_argument("--ram", help="budget of host memory, such as 3GiB or 80%%")
    parser.add_argument("--vram", help="budget of the GPU")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt and its answer, that fit in the budget")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()

    import uvicorn
    from transformers import AutoTokenizer

    inputs = Inputs(prompt=given.tokens // 2, total=given.tokens)
    model = brim.load(given.model, ram=given.ram, vram=given.vram, inputs=inputs)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    uvicorn.run(application(given.model, model, tokenizer), host=given.host, port=given.port)


if __name__ == "__main__":
    main()
