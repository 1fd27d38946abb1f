#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes plots and the results part of docs/performance.md from the JSON files that bench/run.sh writes.

    bench/report.py [--results bench/results] [--notes bench/notes.json] [--page docs/performance.md] [--no-plots]

Reads h200.json and, where they are there, host.json and streaming.json (of bench/cuda_streaming) in the results folder, refuses what is malformed or does not count, and
writes roofline.svg, time_batch.svg, time_context.svg and host_threads.svg beside them (needs matplotlib) and everything
between the two marks of the page. notes.json has what is not measured: titles, targets, other programs' times, and the
sentences on what limits a row, each with the batches it speaks of.
"""
import argparse
import json
import math
import sys
from pathlib import Path

BEGIN = "<!-- results: written by bench/report.py -->"
END = "<!-- end of results -->"
LEAST_CEILING = 4300  # GB/s; a run with less was disturbed
TENSOR_TFLOPS = 750  # bf16 matrix products of this GPU, measured with a large product
KEYS = ["op", "batch", "context", "us", "us_spread", "bytes", "GBps", "percent"]
HOST_KEYS = ["operation", "shape", "isa", "threads", "us", "us_spread", "GBps", "gweights", "ceiling_GBps", "percent"]
OPS = ["moe_experts", "kda_fused", "mla_attention", "attnres_norm", "dense_kda", "dense_mla", "dense_moe", "lm_head",
       "layer_kda_moe", "layer_mla_moe", "step_depth_cut"]


STREAMING_KEYS = ["layers", "GB", "experts", "expert_MB", "copies_GBps", "plain_reads_GBps", "experts_GBps"]
DECODING_KEYS = ["cache_percent", "slots", "tokens_per_s", "first_token_ms", "experts_GBps", "found_percent", "again_tokens_per_s"]


class Malformed(Exception):
    pass


def require(condition, text):
    if not condition:
        raise Malformed(text)


def number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as problem:
        raise Malformed(f"{path}: {problem}") from problem


# What a row must cost: bytes at the read ceiling, or the mathematics of attention (96 heads, 576 wide keys, 512 wide values).
def math_us(row):
    if row["op"] != "mla_attention":
        return 0.0
    return 2 * 96 * (576 + 512) * row["context"] * row["batch"] / (TENSOR_TFLOPS * 1e6)


def limit_us(row, ceiling):
    return max(row["bytes"] / ceiling * 1e-3, math_us(row))


def check_device(data, name):
    require(isinstance(data, dict), f"{name}: not an object")
    for key in ["gpu", "date", "read_ceiling_GBps", "copy_GBps", "rows"]:
        require(key in data, f"{name}: no {key}")
    require(isinstance(data["gpu"], str) and isinstance(data["date"], str), f"{name}: gpu and date are texts")
    ceiling = data["read_ceiling_GBps"]
    require(number(ceiling) and number(data["copy_GBps"]), f"{name}: ceilings are numbers")
    require(ceiling >= LEAST_CEILING, f"{name}: the read ceiling, {ceiling} GB/s, is below {LEAST_CEILING}: the run does not count")
    require(isinstance(data["rows"], list) and data["rows"], f"{name}: no rows")
    seen = set()
    for index, row in enumerate(data["rows"]):
        where = f"{name}: row {index}"
        require(isinstance(row, dict) and sorted(row) == sorted(KEYS), f"{where}: its keys are not {', '.join(KEYS)}")
        require(row["op"] in OPS, f"{where}: unknown op {row['op']!r}")
        where += f" ({row['op']})"
        require(isinstance(row["batch"], int) and not isinstance(row["batch"], bool) and row["batch"] > 0, f"{where}: batch {row['batch']!r}")
        context = row["context"]
        require(context is None or (isinstance(context, int) and not isinstance(context, bool) and context > 0), f"{where}: context {context!r}")
        require(row["op"] != "mla_attention" or context, f"{where}: without a context")
        for key in ["us", "us_spread", "bytes", "GBps", "percent"]:
            require(number(row[key]) and (row[key] > 0 or key == "us_spread" and row[key] == 0), f"{where}: {key} {row[key]!r}")
        rate, share = row["bytes"] / row["us"] * 1e-3, 100 * limit_us(row, ceiling) / row["us"]
        require(abs(row["GBps"] - rate) <= 0.01 * rate + 0.1, f"{where}: GBps {row['GBps']}, not {rate:.1f}")
        require(abs(row["percent"] - share) <= 0.01 * share + 0.1, f"{where}: percent {row['percent']}, not {share:.2f}")
        require(share <= 110, f"{where}: {share:.0f} % of what the memory gives")
        key = (row["op"], row["batch"], context)
        require(key not in seen, f"{where}: twice the same batch and context")
        seen.add(key)
    return data


def check_host(data, name):
    require(isinstance(data, dict) and {"cpu", "date", "read_ceilings", "rows"} <= set(data), f"{name}: keys missing")
    for ceiling in data["read_ceilings"]:
        require(isinstance(ceiling, dict) and number(ceiling.get("threads")) and number(ceiling.get("GBps")), f"{name}: a read ceiling")
    require(isinstance(data["rows"], list) and data["rows"], f"{name}: no rows")
    for index, row in enumerate(data["rows"]):
        require(isinstance(row, dict) and sorted(row) == sorted(HOST_KEYS), f"{name}: row {index}: its keys are not {', '.join(HOST_KEYS)}")
        for key in HOST_KEYS[3:]:
            require(number(row[key]) and row[key] >= 0, f"{name}: row {index}: {key} {row[key]!r}")
        require(row["ceiling_GBps"] > 0, f"{name}: row {index}: ceiling_GBps {row['ceiling_GBps']!r}")
        share = 100 * row["GBps"] / row["ceiling_GBps"]
        require(abs(row["percent"] - share) <= 0.01 * share + 0.1, f"{name}: row {index}: percent {row['percent']}, not {share:.2f}")
    return data


def check_streaming(data, name):
    require(isinstance(data, dict) and {"gpu", "date", "tokens", "checkpoints"} <= set(data), f"{name}: keys missing")
    require(isinstance(data["checkpoints"], list) and data["checkpoints"], f"{name}: no checkpoints")
    for index, checkpoint in enumerate(data["checkpoints"]):
        for key in STREAMING_KEYS:
            require(number(checkpoint.get(key)) and checkpoint[key] > 0, f"{name}: checkpoint {index}: {key}")
        require(checkpoint.get("decoding"), f"{name}: checkpoint {index}: no decoding")
        for row in checkpoint["decoding"]:
            for key in DECODING_KEYS:
                require(number(row.get(key)) and row[key] >= 0, f"{name}: checkpoint {index}: {key} {row.get(key)!r}")
            require(row.get("same_tokens") is True, f"{name}: checkpoint {index}: other tokens at {row['cache_percent']} %")
    return data


class Notes:
    """Titles, targets, other programs' times and limits of notes.json."""

    def __init__(self, data, name):
        require(isinstance(data, dict) and isinstance(data.get("ops"), dict), f"{name}: no ops")
        self.ops, self.name = data["ops"], name
        for op, about in self.ops.items():
            require(op in OPS, f"{name}: unknown op {op!r}")
            require("title" in about and "limits" in about, f"{name}: {op} without title or limits")

    def _find(self, entries, row):
        for entry in entries:
            if entry.get("batch") == row["batch"] and entry.get("context") in (None, row["context"]):
                return entry
        return None

    def title(self, op):
        require(op in self.ops, f"{self.name}: nothing about {op}")
        return self.ops[op]["title"]

    def target(self, row):
        """(microseconds or None, percent or None)"""
        found = self._find(self.ops[row["op"]].get("targets", []), row)
        return (found.get("us"), found.get("percent")) if found else (None, None)

    def public(self, row):
        return self._find(self.ops[row["op"]].get("public", []), row)

    def limits(self, op, rows):
        """The sentences on these rows; every row needs one."""
        about, used = self.ops[op]["limits"], []
        for row in rows:
            found = [n for n in about if n["batches"][0] <= row["batch"] <= n["batches"][1] and ("context" not in n or n["context"] == row["context"])]
            require(found, f"{self.name}: no sentence says what limits {op} at batch {row['batch']}, context {row['context']}")
            used += [n for n in found if n not in used]
        return used


def contexts_text(context):
    if context is None:
        return ""
    return f"{context // 1024}k" if context < 1 << 20 else f"{context >> 20}M"


def spread(row):
    return f"{row['us']:.1f} ± {row['us_spread'] / 2:.1f}" if row["us"] < 1000 else f"{row['us']:.0f} ± {row['us_spread'] / 2:.0f}"


def batches_text(batches):
    return f"Batch {batches[0]}" if batches[0] == batches[1] else f"Batch {batches[0]} to {batches[1]}"


def met(row, target):
    us, percent = target
    if us is None and percent is None:
        return "", ""
    good = row["us"] <= us if us is not None else row["percent"] >= percent
    return (f"≤ {us:g} us" if us is not None else f"≥ {percent:g} %"), "met" if good else "not met"


def device_text(data, notes):
    ceiling = data["read_ceiling_GBps"]
    out = [f"{data['gpu']}, {data['date'][:10]}. Plain read {ceiling:.0f} GB/s, copy {data['copy_GBps']:.0f} GB/s (read and written), measured in the same run.",
           "",
           "Times are medians of graph replays, ± half the distance from the 10th to the 90th percentile. *Limit* is the bytes over the "
           "read rate; for MLA attention the larger of that and its products at 750 TFLOP/s. *%* is limit over time.", "",
           "![Roofline](../bench/results/roofline.svg)", "", "![Time against batch](../bench/results/time_batch.svg)", "",
           "![Time against context](../bench/results/time_context.svg)", ""]
    for op in OPS:
        rows = sorted((r for r in data["rows"] if r["op"] == op), key=lambda r: (r["context"] or 0, r["batch"]))
        if not rows:
            continue
        with_context = any(r["context"] for r in rows)
        others = any(notes.public(r) for r in rows)
        head = ["batch"] + (["context"] if with_context else []) + ["us", "limit us", "MB", "GB/s", "%", "target", ""]
        head += ["best public us", "times faster"] if others else []
        out += [f"### {notes.title(op)} (`{op}`)", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            cells = [str(row["batch"])] + ([contexts_text(row["context"])] if with_context else [])
            cells += [spread(row), f"{limit_us(row, ceiling):.1f}", f"{row['bytes'] * 1e-6:.1f}", f"{row['GBps']:.0f}", f"{row['percent']:.1f}"]
            cells += met(row, notes.target(row))
            if others:
                public = notes.public(row)
                cells += [f"{public['us']:g} ({public['what']})", f"{public['us'] / row['us']:.2f}"] if public else ["", ""]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
        if op == "step_depth_cut":
            rates = ", ".join(f"{1e6 * r['batch'] / r['us']:.0f} at batch {r['batch']}" for r in rows)
            out += [f"Tokens a second: {rates}.", ""]
        first, last = (min(rows, key=lambda r: r["batch"]), max(rows, key=lambda r: r["batch"]))
        low, high = min(r["percent"] for r in rows), max(r["percent"] for r in rows)
        out += [f"- Measured: {low:.0f} to {high:.0f} % of the limit; {first['us'] - limit_us(first, ceiling):.1f} us above it at batch "
                f"{first['batch']}, {last['us'] - limit_us(last, ceiling):.0f} us at batch {last['batch']}."]
        for note in notes.limits(op, rows):
            where = batches_text(note["batches"]) + (f", context {contexts_text(note['context'])}" if "context" in note else "")
            out.append(f"- {where}: {note['text']}")
        out.append("")
    return out


def host_text(data):
    ceilings = ", ".join(f"{c['GBps']:.1f} GB/s with {c['threads']:g} thread{'' if c['threads'] == 1 else 's'}" for c in data["read_ceilings"])
    best = {}  # the fastest version for each number of threads
    for row in data["rows"]:
        line = best.setdefault((row["operation"], row["shape"]), {})
        if row["threads"] not in line or row["us"] < line[row["threads"]]["us"]:
            line[row["threads"]] = row
    threads = sorted({row["threads"] for row in data["rows"]})
    out = ["### The host", "", f"{data['cpu']}, {data['date'][:10]}. Plain read over 512 MB: {ceilings}. Each program measures it for itself, and "
           "*% of read* is of its own; the largest stand here.", "",
           "![Threads](../bench/results/host_threads.svg)", "",
           "Microseconds of the fastest version that the processor has, by threads; rates are those with all threads.", "",
           "| operation | shape | " + " | ".join(str(t) for t in threads) + " | GB/s | Gweights/s | % of read |",
           "|---|---|" + "---|" * len(threads) + "---|---|---|"]
    for (operation, shape), line in best.items():
        last = line[max(line)]
        cells = [f"{line[t]['us']:.1f}" if t in line else "" for t in threads]
        weights = f"{last['gweights']:.1f}" if last["gweights"] else ""
        out.append(f"| {operation} | {shape} | " + " | ".join(cells) + f" | {last['GBps']:.1f} | {weights} | {last['percent']:.0f} |")
    return out + [""]


def streaming_text(data):
    out = ["### Experts from the files to a GPU", "",
           f"{data['gpu']}, {data['date'][:10]}, {data['tokens']} tokens, the same at every size of the cache. *Again*: the same text a second time.", "",
           "| checkpoint | cache | slots | tokens/s | first token ms | experts GB/s | of the copies | found there | again, tokens/s |",
           "|---|---|---|---|---|---|---|---|---|"]
    for checkpoint in data["checkpoints"]:
        for row in checkpoint["decoding"]:
            resident = row["slots"] == 0  # no cache: all experts are on the device
            cells = [f"{checkpoint['layers']} layers, {checkpoint['GB']:.1f} GB", "all, the resident decoder" if resident else f"{row['cache_percent']:.1f} %",
                     str(checkpoint["experts"] if resident else row["slots"]), f"{row['tokens_per_s']:.1f}", f"{row['first_token_ms']:.1f}"]
            cells += ["", "", ""] if resident else [f"{row['experts_GBps']:.1f}", f"{100 * row['experts_GBps'] / checkpoint['copies_GBps']:.0f} %",
                                                    f"{row['found_percent']:.1f} %"]
            cells.append(f"{row['again_tokens_per_s']:.1f}" if row["again_tokens_per_s"] else "")
            out.append("| " + " | ".join(cells) + " |")
    out += ["", "Without decoding:", "", "| checkpoint | PCIe copies GB/s | plain reads GB/s | experts to the GPU GB/s | of the copies |", "|---|---|---|---|---|"]
    for checkpoint in data["checkpoints"]:
        out.append(f"| {checkpoint['layers']} layers, {checkpoint['experts']} experts of {checkpoint['expert_MB']:.2f} MB | {checkpoint['copies_GBps']:.1f} | "
                   f"{checkpoint['plain_reads_GBps']:.1f} | {checkpoint['experts_GBps']:.1f} | "
                   f"{100 * checkpoint['experts_GBps'] / checkpoint['copies_GBps']:.0f} % |")
    return out + [""]


def put_into_page(page, lines):
    text = Path(page).read_text(encoding="utf-8")
    require(text.count(BEGIN) == 1 and text.count(END) == 1 and text.index(BEGIN) < text.index(END), f"{page}: the two marks are not there")
    head, rest = text.split(BEGIN)
    Path(page).write_text(head + BEGIN + "\n\n" + "\n".join(lines).rstrip() + "\n\n" + END + rest.split(END)[1], encoding="utf-8")


def flops(row):
    """Operations of one row, counted from its shapes, a multiply-add as two; None where they do not matter."""
    batch, context = row["batch"], row["context"] or 0
    kda, mla, moe = (887_160_832 / 2, 464_388_096 / 2, 379_845_120 / 2)  # weights of the dense products
    routed = 16 * 3 * 3584 * 3072
    attend = 96 * (576 + 512) * context
    weights = {"moe_experts": routed, "dense_kda": kda, "dense_mla": mla, "dense_moe": moe, "lm_head": 163840 * 7168,
               "mla_attention": attend, "kda_fused": 96 * 128 * 128 * 4, "layer_kda_moe": kda + moe + routed,
               "layer_mla_moe": mla + moe + routed + attend,
               "step_depth_cut": 6 * (moe + routed) + 6 * kda + mla + attend + 3 * 33792 * 7168 + 163840 * 7168}
    return 2 * batch * weights[row["op"]] if row["op"] in weights else None


def plot(data, host, notes, folder):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "k3", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / name, metadata={"Date": None})
        pyplot.close(figure)

    rows, ceiling = data["rows"], data["read_ceiling_GBps"]
    present = [op for op in OPS if any(r["op"] == op for r in rows)]
    colours = {op: pyplot.get_cmap("tab20")(i) for i, op in enumerate(OPS)}

    figure, axes = pyplot.subplots(figsize=(8, 5))
    edge = [0.3 * 1.1**i for i in range(90)]
    axes.plot(edge, [min(ceiling * 1e-3 * x, TENSOR_TFLOPS) for x in edge], color="black", label=f"{ceiling:.0f} GB/s, {TENSOR_TFLOPS} TFLOP/s")
    for op in present:
        points = [(flops(r) / r["bytes"], flops(r) / r["us"] * 1e-6) for r in rows if r["op"] == op and flops(r)]
        if points:
            axes.plot([p[0] for p in points], [p[1] for p in points], "o", ms=4, color=colours[op], label=op)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=f"Roofline, {data['gpu']}")
    axes.legend(fontsize=7)
    save(figure, "roofline.svg")

    across = 3
    down = -(-len(present) // across)
    figure, grid = pyplot.subplots(down, across, figsize=(11, 2.9 * down), squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    for axes, op in zip(grid.flat, present):
        axes.set_visible(True)
        mine = [r for r in rows if r["op"] == op]
        for context in sorted({r["context"] or 0 for r in mine}):
            line = sorted((r for r in mine if (r["context"] or 0) == context), key=lambda r: r["batch"])
            name = contexts_text(context or None)
            drawn = axes.plot([r["batch"] for r in line], [r["us"] for r in line], "o-", ms=3, label=f"measured {name}".strip())
            axes.plot([r["batch"] for r in line], [limit_us(r, ceiling) for r in line], ":", color=drawn[0].get_color(), label=f"limit {name}".strip())
            other = [(r["batch"], notes.public(r)["us"]) for r in line if notes.public(r)]
            if other:
                axes.plot([o[0] for o in other], [o[1] for o in other], "x", color=drawn[0].get_color(), label=f"best public {name}".strip())
        axes.set(xscale="log", yscale="log", title=op, xlabel="batch", ylabel="us")
        axes.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], ["1", "2", "4", "8", "16", "32", "64", "128"])
        axes.minorticks_off()
        axes.legend(fontsize=6)
    save(figure, "time_batch.svg")

    figure, grid = pyplot.subplots(1, 2, figsize=(11, 4), squeeze=False)
    for axes, op in zip(grid.flat, ["mla_attention", "layer_mla_moe"]):
        for batch in sorted({r["batch"] for r in rows if r["op"] == op}):
            line = sorted((r for r in rows if r["op"] == op and r["batch"] == batch), key=lambda r: r["context"])
            drawn = axes.plot([r["context"] for r in line], [r["us"] for r in line], "o-", ms=3, label=f"batch {batch}")
            axes.plot([r["context"] for r in line], [limit_us(r, ceiling) for r in line], ":", color=drawn[0].get_color())
        axes.set(xscale="log", yscale="log", title=f"{op} (dotted: limit)", xlabel="context", ylabel="us")
        if axes.lines:
            axes.legend(fontsize=6)
    save(figure, "time_context.svg")

    if host:
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        ceilings = sorted(host["read_ceilings"], key=lambda c: c["threads"])
        axes.plot([c["threads"] for c in ceilings], [c["GBps"] for c in ceilings], "k--", label="plain read")
        best = {}
        for row in host["rows"]:
            lines = best.setdefault((row["operation"], row["shape"]), {})
            lines[row["threads"]] = max(lines.get(row["threads"], 0), row["GBps"])
        for (operation, shape), points in best.items():
            if shape.endswith("B=1") and len(points) > 1:
                threads = sorted(points)
                axes.plot(threads, [points[t] for t in threads], "o-", ms=3, label=f"{operation} {shape}")
        axes.set(xscale="log", yscale="log", xlabel="threads", ylabel="GB/s", title=host["cpu"])
        axes.set_xticks([c["threads"] for c in ceilings], [f"{c['threads']:g}" for c in ceilings])
        axes.minorticks_off()
        axes.legend(fontsize=6)
        save(figure, "host_threads.svg")


def main():
    root = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=root / "results")
    parser.add_argument("--notes", type=Path, default=root / "notes.json")
    parser.add_argument("--page", type=Path, default=root.parent / "docs" / "performance.md")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    try:
        notes = Notes(load(options.notes), options.notes)
        data = check_device(load(options.results / "h200.json"), options.results / "h200.json")
        host_file = options.results / "host.json"
        host = check_host(load(host_file), host_file) if host_file.exists() else None
        streaming_file = options.results / "streaming.json"
        streaming = check_streaming(load(streaming_file), streaming_file) if streaming_file.exists() else None
        lines = device_text(data, notes) + (host_text(host) if host else []) + (streaming_text(streaming) if streaming else [])
        if not options.no_plots:
            plot(data, host, notes, options.results)
        put_into_page(options.page, lines)
    except Malformed as problem:
        print(f"report.py: {problem}", file=sys.stderr)
        return 1
    except ImportError as problem:
        print(f"report.py: {problem}: install matplotlib, or pass --no-plots", file=sys.stderr)
        return 1
    print(f"wrote {options.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
