"""Decode and prefill of kie, llama.cpp and transformers on the CPU, interleaved in one run.

    make bench-peers                 # all of it, and the table goes into docs/figures.md
    python benches/peers.py [--threads 2] [--rounds 3] [--peers PYTHON] [--only BF16 Q8_0]

The model is random (never zeros), 2048 wide, 16 layers, 32/8 heads of 64, F 8192, vocabulary
32,000 untied: BF16 for all three, Q8_0 and Q4_K as one GGUF file for kie and llama.cpp, FP8 and
INT4 (`kie quantize`) for kie. MXFP4 is another model, six layers of GPT-OSS-20B (2.7 GB), for kie
as published and for llama.cpp as GGUF. Each round measures read bandwidth, then every engine in
its own process (so that nobody's threads or caches help or hurt the next), then bandwidth again; a
round whose two bandwidths differ by more than 15 % was disturbed and is dropped. Medians of the
rest are printed as a table. At the end `kie run` is started with the default model's files out of
the page cache, up to its first token.

The peers live in an environment of their own: PYTHON needs torch, transformers, gguf and
llama-cpp-python. Who is absent is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BASELINES, FIGURES = ROOT / "benches" / "baselines.jsonl", ROOT / "docs" / "figures.md"
BEGIN, END = "<!-- peers: benches/peers.py writes up to the next mark -->", "<!-- peers end -->"
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCAB = 2048, 16, 32, 8, 8192, 32000
HEAD_DIM = HIDDEN // HEADS
DECODE_TOKENS = 24
PROMPT_IDS = [7 + 11 * i % 31000 for i in range(512)]
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
EXPERTS = "gpt-oss-20b-few"
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


# Bytes of a block and its elements.
BLOCKS = {"BF16": (2, 1), "Q8_0": (34, 32), "Q4_K": (144, 256), "MXFP4": (17, 32)}


def add_words(writer: Any, count: int) -> None:
    """A vocabulary of so many words, which nobody reads."""
    writer.add_vocab_size(count)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([1] * count)


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
    add_words(writer, VOCAB)
    return writer


def blocks(rng: Any, kind: str, shape: tuple[int, int]) -> Any:
    """A random matrix in blocks, as bytes a row; values are spread as those of `write_folder`."""
    import numpy as np

    size, elements = BLOCKS[kind]
    count = shape[1] // elements
    raw = rng.integers(0, 256, (shape[0], count, size), np.uint8)
    spread = 0.7 / shape[1] ** 0.5
    if kind == "Q8_0":
        scales = np.full((shape[0], count, 1), spread / 73, np.float16)
    else:
        # A scale of codes and one of minima, each times six random bits.
        scale = spread / (31 * 4.6)
        scales = np.broadcast_to(np.float16([scale, 7.5 * scale]), (shape[0], count, 2)).copy()
    raw[:, :, : 2 * scales.shape[2]] = scales.view(np.uint8)
    return raw.reshape(shape[0], -1)


def write_folder(folder: Path) -> None:
    """The random checkpoint in BF16, as Hugging Face writes it."""
    import numpy as np

    folder.mkdir(parents=True)
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
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in SHAPES.values():
            values = np.ones(shape, np.float32)
            if len(shape) == 2:
                values = rng.standard_normal(shape, np.float32) * (0.7 / shape[1] ** 0.5)
            out.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def write_gguf(path: Path, kind: str) -> None:
    """The random checkpoint as GGUF; the embedding is BF16, the norms are float32."""
    import gguf
    import numpy as np

    writer, rng = gguf_writer(path), np.random.default_rng(1)
    for name, shape in SHAPES.items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        kept = "BF16" if name == "model.embed_tokens.weight" else kind
        if kept == "BF16":
            values = rng.standard_normal(shape, np.float32) * (0.7 / shape[1] ** 0.5)
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            raw = blocks(rng, kept, shape)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType[kept])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def experts_writer(path: Path, config: dict[str, Any]) -> Any:
    """A GGUF file with the metadata of a GPT-OSS, ready for its tensors."""
    import gguf

    rope, words = config["rope_scaling"], config["vocab_size"]
    writer = gguf.GGUFWriter(str(path), "gpt-oss", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    add_words(writer, words)
    return writer


def write_experts(path: Path) -> None:
    """The shape of the folder `mxfp4` beside it as GGUF: experts MXFP4, all other matrices BF16."""
    import gguf
    import numpy as np

    config = json.loads((path.parent / "mxfp4" / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, experts, words = config["head_dim"], config["num_local_experts"], config["vocab_size"]
    writer, rng = experts_writer(path, config), np.random.default_rng(1)

    def halves(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape, np.float32) * (0.7 / shape[-1] ** 0.5)
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        writer.add_tensor(name + ".weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def floats(name: str, *shape: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(shape, value, np.float32))

    def codes(name: str, rows: int, columns: int) -> None:
        size, elements = BLOCKS["MXFP4"]
        raw = rng.integers(0, 256, (experts, rows, columns // elements, size), np.uint8)
        raw[..., 0] = 120  # 2^-7
        raw = raw.reshape(experts, rows, -1)
        writer.add_tensor(name + ".weight", raw, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        floats(name + ".bias", experts, rows)

    halves("token_embd", words, hidden)
    halves("output", words, hidden)
    floats("output_norm.weight", hidden, value=1.0)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        for name in ("attn_norm", "post_attention_norm"):
            floats(f"{block}{name}.weight", hidden, value=1.0)
        for name, rows, columns in (
            ("attn_q", heads * dim, hidden),
            ("attn_k", kv_heads * dim, hidden),
            ("attn_v", kv_heads * dim, hidden),
            ("attn_output", hidden, heads * dim),
        ):
            halves(block + name, rows, columns)
            floats(f"{block}{name}.bias", rows)
        floats(block + "attn_sinks.weight", heads)
        router = rng.standard_normal((experts, hidden), np.float32) * hidden**-0.5
        writer.add_tensor(block + "ffn_gate_inp.weight", router)
        floats(block + "ffn_gate_inp.bias", experts)
        codes(block + "ffn_gate_exps", inner, hidden)
        codes(block + "ffn_up_exps", inner, hidden)
        codes(block + "ffn_down_exps", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure_kie(model: Path, threads: int) -> dict[str, float]:
    """tok/s of decode after a short prompt, and of a 512-token prefill."""
    import kie

    options = {"device": "cpu", "threads": threads, "max_seq_len": 1024, "max_batch": 1}
    with kie.Engine(str(model), **options) as engine:
        short = list(range(5, 37))
        engine.generate(short, max_tokens=2, ignore_eos=True)
        with engine.stream(short, max_tokens=DECODE_TOKENS, ignore_eos=True) as stream:
            stamps = [token.t_ns for token in stream]
        gaps = [b - a for a, b in itertools.pairwise(stamps)]
        done = engine.generate(PROMPT_IDS, max_tokens=1, ignore_eos=True)
        return {
            "decode": 1e9 / statistics.median(gaps),
            "prefill": len(PROMPT_IDS) / (done.timings.prompt_ms / 1e3),
            "bytes": engine.info()["bytes_per_token"],
        }


def measure_llama_cpp(model: Path, threads: int) -> dict[str, float]:
    """The same through llama-cpp-python's low-level evaluation."""
    from llama_cpp import Llama

    llama = Llama(
        str(model),
        n_ctx=1024,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
        logits_all=False,
    )
    llama.eval(list(range(5, 37)))
    gaps = []
    for token in range(DECODE_TOKENS):
        begin = time.perf_counter()
        llama.eval([100 + token])
        gaps.append(time.perf_counter() - begin)
    llama.reset()
    begin = time.perf_counter()
    llama.eval(PROMPT_IDS)
    took = time.perf_counter() - begin
    return {"decode": 1 / statistics.median(gaps), "prefill": len(PROMPT_IDS) / took}


def measure_transformers(model: Path, threads: int) -> dict[str, float]:
    """The same through transformers in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        out = net(torch.arange(5, 37)[None], use_cache=True)
        gaps = []
        for token in range(DECODE_TOKENS):
            begin = time.perf_counter()
            next_id = torch.tensor([[100 + token]])
            out = net(next_id, past_key_values=out.past_key_values, use_cache=True)
            gaps.append(time.perf_counter() - begin)
        prompt = torch.tensor([PROMPT_IDS])
        net(prompt, logits_to_keep=1)
        begin = time.perf_counter()
        net(prompt, use_cache=True, logits_to_keep=1)
        took = time.perf_counter() - begin
    return {"decode": 1 / statistics.median(gaps), "prefill": len(PROMPT_IDS) / took}


def measure_bandwidth(_: Path, threads: int) -> dict[str, float]:
    """GB/s of `threads` threads that read 2 GB with wide loads."""
    from kie import _kie

    return {"bandwidth": _kie.read_bandwidth(threads=threads) / 1e9}


def measure_versions(_: Path, __: int) -> dict[str, str]:
    """Versions of the peers that are there."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("llama-cpp-python", "torch", "transformers", "gguf"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


CHILDREN = {
    "bandwidth": measure_bandwidth,
    "versions": measure_versions,
    "kie": measure_kie,
    "llama.cpp": measure_llama_cpp,
    "transformers": measure_transformers,
    "write BF16": lambda model, _: write_gguf(model, "BF16"),
    "write Q8_0": lambda model, _: write_gguf(model, "Q8_0"),
    "write Q4_K": lambda model, _: write_gguf(model, "Q4_K"),
    "write MXFP4": lambda model, _: write_experts(model),
}
# What each engine reads, by encoding.
READS = {
    "BF16": {"kie": "bf16", "llama.cpp": "bf16.gguf", "transformers": "bf16"},
    "FP8": {"kie": "fp8"},
    "Q8_0": {"kie": "q8_0.gguf", "llama.cpp": "q8_0.gguf"},
    "INT4": {"kie": "int4"},
    "Q4_K": {"kie": "q4_k.gguf", "llama.cpp": "q4_k.gguf"},
    "MXFP4": {"kie": "mxfp4", "llama.cpp": "mxfp4.gguf"},
}
NEEDS = {"llama.cpp": "llama-cpp-python", "transformers": "transformers"}


class Run:
    """One comparison: where its models are, who takes part."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.versions = self.child("versions", folder, args.peers)
        self.engines = ["kie"]
        for engine, package in NEEDS.items():
            if package in self.versions and "gguf" in self.versions:
                self.engines.append(engine)
            else:
                print(f"{engine}: {package} or gguf not installed, left out", file=sys.stderr)

    def child(self, name: str, model: Path, python: str = sys.executable) -> Any:
        """Runs one measurement in a process of its own."""
        threads = str(self.args.threads)
        command = [python, __file__, "--child", name, "--model", str(model), "--threads", threads]
        env = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        run = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        return json.loads(run.stdout.splitlines()[-1])

    def make(self, encoding: str) -> None:
        """Writes the models of an encoding that are not there."""
        if not (self.folder / "bf16").exists() and encoding in ("BF16", "FP8", "INT4"):
            write_folder(self.folder / "bf16")
        for engine, name in READS[encoding].items():
            model = self.folder / name
            if model.exists() or (name.endswith(".gguf") and "gguf" not in self.versions):
                continue
            if name.endswith(".gguf"):
                self.child(f"write {encoding}", model, self.args.peers)
            elif encoding == "MXFP4":
                from kie.bench import random_weights

                random_weights.write(EXPERTS, model)
            elif engine == "kie":
                command = [sys.executable, "-m", "kie", "quantize", str(self.folder / "bf16")]
                subprocess.run([*command, str(model), "--to", name], check=True)

    def rounds(self) -> list[dict[str, Any]]:
        found = []
        for index in range(self.args.rounds):
            row: dict[str, Any] = {"before": self.child("bandwidth", self.folder)["bandwidth"]}
            for encoding in self.args.only:
                for engine, name in READS[encoding].items():
                    model = self.folder / name
                    if engine in self.engines and model.exists():
                        python = sys.executable if engine == "kie" else self.args.peers
                        row[f"{encoding} {engine}"] = self.child(engine, model, python)
            row["after"] = self.child("bandwidth", self.folder)["bandwidth"]
            found.append(row)
            print(f"round {index + 1}: {json.dumps(row)}", file=sys.stderr)
        return found


def first_token_ms(runs: int) -> float:
    """Median time from the start of `kie run` to its first text, the model's files not cached."""
    from kie.bench import coldstart

    found = []
    for _ in range(runs):
        coldstart.forget(None)
        command = [sys.executable, "-m", "kie", "run", "def add(a, b):", "--max-tokens", "8"]
        begin = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
            assert run.stdout
            if not run.stdout.read(1):
                raise RuntimeError("`kie run` wrote nothing")
            found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the undisturbed rounds, as they are recorded."""
    apart = [abs(r["before"] - r["after"]) > 0.15 * max(r["before"], r["after"]) for r in rows]
    kept = [row for row, disturbed in zip(rows, apart, strict=True) if not disturbed] or rows

    def median(values: Any) -> float:
        return round(statistics.median(values), 2)

    results: dict[str, dict[str, Any]] = {}
    for name in [name for name in rows[0] if name not in ("before", "after")]:
        encoding, _, engine = name.partition(" ")
        found = [row[name] for row in kept]
        results.setdefault(encoding, {})[engine] = {
            "decode_tok_per_s": median(f["decode"] for f in found),
            "prefill_512_tok_per_s": median(f["prefill"] for f in found),
        }
        if "bytes" in found[0]:
            results[encoding]["bytes_per_token"] = found[0]["bytes"]
    return {
        "read_bandwidth_gb_per_s": median((r["before"] + r["after"]) / 2 for r in kept),
        "rounds": len(rows),
        "undisturbed": len(rows) - sum(apart),
        "results": results,
    }


def table(record: dict[str, Any]) -> str:
    """The table of the manual."""
    lines = [
        "| weights | GB a token | engine | decode, tokens/s | of read bandwidth | prefill of 512 |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for encoding, found in record["results"].items():
        size = found["bytes_per_token"] / 1e9
        for engine in ("kie", "llama.cpp", "transformers"):
            if engine in found:
                decode = found[engine]["decode_tok_per_s"]
                share = decode * size / record["read_bandwidth_gb_per_s"]
                prefill = found[engine]["prefill_512_tok_per_s"]
                lines.append(
                    f"| {encoding} | {size:.2f} | {engine} | {decode:.1f} | {share:.0%} "
                    f"| {prefill:.0f} |"
                )
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            f"{record['machine']}, {record['threads']} threads, read bandwidth "
            f"{record['read_bandwidth_gb_per_s']:.1f} GB/s, {record['date']}; medians of "
            f"{record['undisturbed'] or record['rounds']} rounds"
            + ("" if record["undisturbed"] else ", all of them disturbed")
            + f"; {versions}. `kie run` from its start to the first token, the model's files not "
            f"cached: {record['first_token_ms']:.0f} ms.",
        ]
    )


def keep(record: dict[str, Any]) -> None:
    """Appends to the baselines, and writes the table into the manual."""
    with BASELINES.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    text = FIGURES.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    FIGURES.write_text(f"{before}{BEGIN}\n\n{table(record)}\n\n{END}{after}", encoding="utf-8")


def machine() -> str:
    """The processor's name, and how many cores there are."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor() or 'a CPU'}"


def compare(folder: Path, args: argparse.Namespace) -> None:
    run = Run(args, folder)
    for encoding in args.only:
        run.make(encoding)
    record = {
        "bench": "cpu_peers",
        "date": date.today().isoformat(),
        "shape": f"llama {HIDDEN} x {LAYERS} layers, {HEADS}/{KV_HEADS} heads, F {FFN}, "
        f"vocabulary {VOCAB} untied, random; MXFP4: {EXPERTS}",
        "threads": args.threads,
        "machine": machine(),
        **summary(run.rounds()),
        "first_token_ms": round(first_token_ms(5), 1),
        "versions": run.versions,
    }
    print(table(record))
    if args.record:
        keep(record)


def main() -> None:
    parser = argparse.ArgumentParser(description="kie beside other engines on the CPU")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=READS, default=list(READS))
    parser.add_argument("--peers", default=sys.executable, help="the Python that has the peers")
    parser.add_argument("--folder", type=Path, help="keep the random models here")
    parser.add_argument("--record", action="store_true", help="into the baselines and the manual")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(CHILDREN[args.child](args.model, args.threads)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compare(folder, args)


if __name__ == "__main__":
    main()
