"""`kie models`: the architectures that kie runs, and public checkpoints of each."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

from kie.cli import options

EXAMPLES = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1",
    "deepseek_v4": "deepseek-ai/DeepSeek-V4-Flash",
    "gemma3_text": "google/gemma-3-270m-it, google/gemma-3-1b-it",
    "gpt_oss": "openai/gpt-oss-20b, openai/gpt-oss-120b",
    "kimi_k2": "moonshotai/Kimi-K2-Instruct, moonshotai/Kimi-K2-Thinking",
    "kimi_k25": "moonshotai/Kimi-K2.5 (its model of text)",
    "laneformer": "the model of the package",
    "llama": "meta-llama/Llama-3.2-1B-Instruct, HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mixtral": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "olmo2": "allenai/OLMo-2-0425-1B-Instruct, allenai/OLMo-2-1124-7B-Instruct",
    "olmoe": "allenai/OLMoE-1B-7B-0924-Instruct",
    "phi3": "microsoft/Phi-4-mini-instruct, microsoft/phi-4",
    "qwen2": "Qwen/Qwen2.5-0.5B-Instruct, Qwen/Qwen2.5-Coder-7B-Instruct",
    "qwen3": "Qwen/Qwen3-0.6B, Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B, Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "qwen3_next": "Qwen/Qwen3-Coder-Next-FP8, Qwen/Qwen3-Next-80B-A3B-Instruct",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
}
"""Checkpoints whose config.json has that `model_type`; of others no public one is known."""


def define(parser: ArgumentParser) -> None:
    """Defines the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    options.verb(parser, models)


def models(given: Namespace) -> None:
    """Prints a line for each `model_type`."""
    from kie import _kie

    architectures, encodings = _kie.supported()
    if given.json:
        examples = {name: EXAMPLES.get(name) for name in architectures}
        print(json.dumps({"architectures": examples, "encodings": encodings}, indent=2))
        return
    width = max(map(len, architectures)) + 2
    for name in architectures:
        print(f"{name:<{width}}{EXAMPLES.get(name, '')}".rstrip())
    print(f"\nweights as {', '.join(encodings)}")
    print("a folder, or a hub id: kie run -m Qwen/Qwen3-0.6B --chat hello")
