"""Decode and prefill of kie, llama.cpp and transformers on the CPU, interleaved in one run.

    python benches/peers.py [--threads 2] [--rounds 5] [--json out.json]

The model is random (never zeros), BF16, 2048 wide, 16 layers, 32/8 heads of 64, F 8192, vocabulary
32,000 untied: 2.08 GB of weights a token. Each round measures read bandwidth, then every engine in
its own process (so that nobody's threads or caches help or hurt the next), then bandwidth again; a
round whose two bandwidths differ by more than 15 % was disturbed and is dropped. Medians and
ratios of the rest are printed, raw rows go to the JSON.

Needs: kie, torch, transformers, gguf, llama-cpp-python (absent peers are named and left out).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 2048, 16, 32, 8, 8192, 32000
HEAD_DIM = HIDDEN // HEADS
DECODE_TOKENS, PROMPT = 24, 512
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
for _i in range(LAYERS):
    _p = f"model.layers.{_i}."
    SHAPES |= {
        _p + "input_layernorm.weight": (HIDDEN,),
        _p + "post_attention_layernorm.weight": (HIDDEN,),
        _p + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        _p + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        _p + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        _p + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        _p + "mlp.gate_proj.weight": (FFN, HIDDEN),
        _p + "mlp.up_proj.weight": (FFN, HIDDEN),
        _p + "mlp.down_proj.weight": (HIDDEN, FFN),
    }
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face Llama tensor."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gguf_writer(path: Path) -> Any:
    """A GGUF file with the model's metadata, ready for its tensors."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    writer.add_token_scores([0.0] * VOCAB)
    writer.add_token_types([1] * VOCAB)
    return writer


def make_model(folder: Path) -> None:
    """Writes the random checkpoint as safetensors and, where `gguf` is there, as GGUF."""
    import numpy as np

    (folder / "config.json").write_text(json.dumps(CONFIG))
    # The cheapest tokenizer there is: kie wants one, the measurements feed ids.
    words = {f"<{i}>": i for i in range(VOCAB)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<0>"}
    keys = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    empty = dict.fromkeys(keys)
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model} | empty
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    rng = np.random.default_rng(1)
    header, offset = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    writer = None
    if importlib.util.find_spec("gguf"):
        writer = gguf_writer(folder / "model.gguf")
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name, shape in SHAPES.items():
            if len(shape) == 1:
                values = np.ones(shape, np.float32)
            else:
                values = rng.standard_normal(shape, np.float32) * (0.7 / shape[1] ** 0.5)
            bits = (values.view(np.uint32) >> 16).astype(np.uint16)
            out.write(bits.tobytes())
            if writer is not None:
                import gguf

                if len(shape) == 1:
                    writer.add_tensor(gguf_name(name), values)
                else:
                    raw = gguf.GGMLQuantizationType.BF16
                    data = bits.view(np.uint8)
                    writer.add_tensor(gguf_name(name), data, raw_dtype=raw)
    if writer is not None:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def measure_kie(folder: Path, threads: int) -> dict[str, float]:
    """tok/s of decode after a short prompt, and of a 512-token prefill."""
    import kie

    engine = kie.Engine(str(folder), device="cpu", threads=threads, max_seq_len=1024, max_batch=1)
    short = list(range(5, 37))
    engine.generate(short, max_tokens=2, ignore_eos=True)
    with engine.stream(short, max_tokens=DECODE_TOKENS, ignore_eos=True) as stream:
        stamps = [token.t_ns for token in stream]
    gaps = [b - a for a, b in itertools.pairwise(stamps)]
    prompt = [7 + 11 * i % 31000 for i in range(PROMPT)]
    done = engine.generate(prompt, max_tokens=1, ignore_eos=True)
    return {
        "decode": 1e9 / statistics.median(gaps),
        "prefill": PROMPT / (done.timings.prompt_ms / 1e3),
    }


def measure_llama_cpp(folder: Path, threads: int) -> dict[str, float]:
    """The same through llama-cpp-python's low-level evaluation."""
    from llama_cpp import Llama

    model = Llama(
        str(folder / "model.gguf"),
        n_ctx=1024,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        logits_all=False,
    )
    model.eval(list(range(5, 37)))
    gaps = []
    for token in range(DECODE_TOKENS):
        begin = time.perf_counter()
        model.eval([100 + token])
        gaps.append(time.perf_counter() - begin)
    model.reset()
    begin = time.perf_counter()
    model.eval([7 + 11 * i % 31000 for i in range(PROMPT)])
    return {
        "decode": 1 / statistics.median(gaps),
        "prefill": PROMPT / (time.perf_counter() - begin),
    }


def measure_transformers(folder: Path, threads: int) -> dict[str, float]:
    """The same through transformers in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        out = model(torch.arange(5, 37)[None], use_cache=True)
        gaps = []
        for token in range(DECODE_TOKENS):
            begin = time.perf_counter()
            next_id = torch.tensor([[100 + token]])
            out = model(next_id, past_key_values=out.past_key_values, use_cache=True)
            gaps.append(time.perf_counter() - begin)
        prompt = torch.tensor([[7 + 11 * i % 31000 for i in range(PROMPT)]])
        model(prompt, logits_to_keep=1)
        begin = time.perf_counter()
        model(prompt, use_cache=True, logits_to_keep=1)
        took = time.perf_counter() - begin
    return {"decode": 1 / statistics.median(gaps), "prefill": PROMPT / took}


def measure_bandwidth(folder: Path, threads: int) -> dict[str, float]:
    """GB/s of `threads` threads that read 2 GB with wide loads."""
    from kie import _kie

    return {"bandwidth": _kie.read_bandwidth(threads=threads) / 1e9}


MEASURES = {
    "bandwidth": (measure_bandwidth, "kie"),
    "kie": (measure_kie, "kie"),
    "llama.cpp": (measure_llama_cpp, "llama_cpp"),
    "transformers": (measure_transformers, "transformers"),
}


def child(name: str, folder: Path, threads: int) -> dict[str, float]:
    """Runs one measurement in a process of its own."""
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(
        [*command, "--threads", str(threads)], env=env, stdout=subprocess.PIPE, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the random model here")
    parser.add_argument("--child", choices=MEASURES)
    args = parser.parse_args()
    if args.child:
        measure, _ = MEASURES[args.child]
        print(json.dumps(measure(args.folder, args.threads)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "model.safetensors").exists():
            make_model(folder)
        compare(folder, args)


def compare(folder: Path, args: argparse.Namespace) -> None:
    engines = [n for n, (_, module) in MEASURES.items() if importlib.util.find_spec(module)]
    for absent in [n for n in MEASURES if n not in engines]:
        print(f"{absent}: not installed, left out", file=sys.stderr)
    rows = []
    for index in range(args.rounds):
        row: dict[str, dict[str, float]] = {}
        before = child("bandwidth", folder, args.threads)["bandwidth"]
        for name in engines[1:]:
            row[name] = child(name, folder, args.threads)
        after = child("bandwidth", folder, args.threads)["bandwidth"]
        row["bandwidth"] = {"before": before, "after": after}
        row["disturbed"] = abs(before - after) > 0.15 * max(before, after)  # type: ignore[assignment]
        rows.append(row)
        print(f"round {index + 1}: {json.dumps(row)}", file=sys.stderr)
    kept = [r for r in rows if not r["disturbed"]] or rows
    bandwidth = statistics.median(
        (r["bandwidth"]["before"] + r["bandwidth"]["after"]) / 2 for r in kept
    )
    weights = 2 * sum(a * (b[0] if b else 1) for a, *b in SHAPES.values()) - 2 * VOCAB * HIDDEN
    print(f"read bandwidth {bandwidth:.1f} GB/s, {len(kept)} of {len(rows)} rounds undisturbed")
    print(f"{'engine':14} {'decode tok/s':>13} {'of bandwidth':>13} {'prefill tok/s':>14}")
    for name in engines[1:]:
        decode = statistics.median(r[name]["decode"] for r in kept)
        prefill = statistics.median(r[name]["prefill"] for r in kept)
        share = decode * weights / 1e9 / bandwidth
        print(f"{name:14} {decode:13.2f} {share:13.1%} {prefill:14.1f}")
    if args.json:
        args.json.write_text(json.dumps({"bandwidth": bandwidth, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
