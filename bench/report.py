#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes plots and the results part of docs/performance.md from the JSON files that bench/run.sh writes.

    bench/report.py [--results bench/results] [--notes bench/notes.json] [--page docs/performance.md] [--no-plots]

Reads h200.json and, where they are there, host.json and streaming.json (of bench/cuda_streaming) in the results folder, refuses what is malformed or does not count, and
writes roofline.svg, time_batch.svg, time_context.svg and host_threads.svg beside them (needs matplotlib) and everything
between the two marks of the page. notes.json has what is not measured: the operations with the batches and contexts that
h200.json must have, titles, targets, other programs' times, and the sentences on what limits a row, each with the batches
and contexts it speaks of.
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


def limit_us(row):
    """Percent is of the read ceiling that the row's own program measured."""
    return row["us"] * row["percent"] / 100


def check_row(row, where, ceiling):
    require(isinstance(row, dict) and sorted(row) == sorted(KEYS), f"{where}: its keys are not {', '.join(KEYS)}")
    require(isinstance(row["batch"], int) and not isinstance(row["batch"], bool) and row["batch"] > 0, f"{where}: batch {row['batch']!r}")
    context = row["context"]
    require(context is None or (isinstance(context, int) and not isinstance(context, bool) and context > 0), f"{where}: context {context!r}")
    require(row["op"] != "mla_attention" or context, f"{where}: without a context")
    for key in ["us", "us_spread", "bytes", "GBps", "percent"]:
        require(number(row[key]) and (row[key] > 0 or key == "us_spread" and row[key] == 0), f"{where}: {key} {row[key]!r}")
    rate, share = row["bytes"] / row["us"] * 1e-3, 100 * math_us(row) / row["us"]
    require(abs(row["GBps"] - rate) <= 0.01 * rate + 0.1, f"{where}: GBps {row['GBps']}, not {rate:.1f}")
    require(row["percent"] <= 110, f"{where}: {row['percent']} % of what the memory gives")
    # Either what its mathematics allows, or its bytes over a read ceiling; percents are rounded to 0.01.
    if abs(row["percent"] - share) > 0.02:
        own = [100 * rate / (row["percent"] + 0.02), 100 * rate / max(row["percent"] - 0.02, 1e-9)]
        require(row["percent"] >= share and own[0] <= 1.1 * ceiling and own[1] >= 0.9 * ceiling,
                f"{where}: percent {row['percent']}, not about {max(share, 100 * rate / ceiling):.2f}")
        require(own[1] >= LEAST_CEILING, f"{where}: of a read ceiling of {own[1]:.0f} GB/s, below {LEAST_CEILING}: the run does not count")


def check_device(data, name, notes):
    require(isinstance(data, dict), f"{name}: not an object")
    for key in ["gpu", "date", "read_ceiling_GBps", "copy_GBps", "rows", "default", "products"]:
        require(key in data, f"{name}: no {key}")
    require(isinstance(data["gpu"], str) and isinstance(data["date"], str), f"{name}: gpu and date are texts")
    ceiling = data["read_ceiling_GBps"]
    require(number(ceiling) and number(data["copy_GBps"]), f"{name}: ceilings are numbers")
    require(ceiling >= LEAST_CEILING, f"{name}: the read ceiling, {ceiling} GB/s, is below {LEAST_CEILING}: the run does not count")
    for part, wanted in notes.required().items():
        require(isinstance(data[part], list) and data[part], f"{name}: no {part}")
        seen = set()
        for index, row in enumerate(data[part]):
            check_row(row, f"{name}: {part} {index} ({row.get('op') if isinstance(row, dict) else ''})", ceiling)
            key = (row["op"], row["batch"], row["context"])
            require(part == "products" or key in wanted, f"{name}: {part} {index}: unknown: {text_of(key)}")
            require(key not in seen, f"{name}: {part}: twice {text_of(key)}")
            seen.add(key)
        for key in wanted:
            require(key in seen, f"{name}: {part}: nothing about {text_of(key)}")
    return data


def text_of(key):
    return f"{key[0]} at batch {key[1]}" + (f", context {key[2]}" if key[2] else "")


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
    """What there must be, titles, targets, other programs' times and limits of notes.json."""

    def __init__(self, data, name):
        require(isinstance(data, dict) and {"batches", "ops", "products"} <= set(data), f"{name}: no batches, ops or products")
        self.batches, self.ops, self.products, self.name = data["batches"], data["ops"], data["products"], name
        for op, about in self.ops.items():
            require("title" in about and "limits" in about, f"{name}: {op} without title or limits")

    def required(self):
        """The rows of each list of the results: (op, batch, context)"""
        every = {op: [(op, batch, context) for context in about.get("contexts", [None]) for batch in self.batches] +
                     [(op, one["batch"], one["context"]) for one in about.get("further", [])] for op, about in self.ops.items()}
        return {"rows": [key for keys in every.values() for key in keys],
                "default": [key for op, keys in every.items() if self.ops[op].get("modes") for key in keys],
                "products": [(p["name"], int(batch), None) for p in self.products if p["name"] not in self.ops for batch in p["public"]]}

    def _find(self, entries, row):
        for entry in entries:
            if entry.get("batch") == row["batch"] and entry.get("context") in (None, row["context"]):
                return entry
        return None

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
            found = [n for n in about if n["batches"][0] <= row["batch"] <= n["batches"][1]
                     and ("contexts" not in n or n["contexts"][0] <= row["context"] <= n["contexts"][1])]
            require(found, f"{self.name}: no sentence says what limits {op} at batch {row['batch']}, context {row['context']}")
            used += [n for n in found if n not in used]
        return used


def contexts_text(context):
    if context is None:
        return ""
    return f"{context // 1024}k" if context < 1 << 20 else f"{context >> 20}M"


def spread(row):
    return f"{row['us']:.1f} ± {row['us_spread'] / 2:.1f}" if row["us"] < 1000 else f"{row['us']:.0f} ± {row['us_spread'] / 2:.0f}"


def where_text(note):
    texts = [f"Batch {note['batches'][0]}" + (f" to {note['batches'][1]}" if note["batches"][0] != note["batches"][1] else "")]
    if "contexts" in note:
        low, high = map(contexts_text, note["contexts"])
        texts.append(low if low == high else f"{low} to {high}")
    return ", ".join(texts)


def met(row, target):
    us, percent = target
    if us is None and percent is None:
        return "", ""
    good = row["us"] <= us if us is not None else row["percent"] >= percent
    return (f"≤ {us:g} us" if us is not None else f"≥ {percent:g} %"), "met" if good else "not met"


def device_text(data, notes):
    out = [f"{data['gpu']}, {data['date'][:10]}. Plain read {data['read_ceiling_GBps']:.0f} GB/s, copy {data['copy_GBps']:.0f} GB/s (read and written) in the "
           "last program; each measures them for itself, and percentages are of its own read rate.", "",
           "Times are medians of graph replays, ± half the distance from the 10th to the 90th percentile. *Limit* is the bytes over the "
           "read rate; for MLA attention the larger of that and its products at 750 TFLOP/s. *%* is limit over time. *Default* are the times of "
           "the default mode, in which a row's bits do not depend on its batch; all others are of `independent = false`, which makes no "
           "difference where there is no such column.", "",
           "![Roofline](../bench/results/roofline.svg)", "", "![Time against batch](../bench/results/time_batch.svg)", "",
           "![Time against context](../bench/results/time_context.svg)", ""]
    default = {(r["op"], r["batch"], r["context"]): r for r in data["default"]}
    for op, about in notes.ops.items():
        rows = sorted((r for r in data["rows"] if r["op"] == op), key=lambda r: (r["context"] or 0, r["batch"]))
        with_context = any(r["context"] for r in rows)
        others = any(notes.public(r) for r in rows)
        head = ["batch"] + (["context"] if with_context else []) + ["us", "limit us", "MB", "GB/s", "%", "target", ""]
        head += ["best public us", "times faster"] if others else []
        head += ["default us", ""] if about.get("modes") else []
        out += [f"### {about['title']} (`{op}`)", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in rows:
            cells = [str(row["batch"])] + ([contexts_text(row["context"])] if with_context else [])
            cells += [spread(row), f"{limit_us(row):.1f}", f"{row['bytes'] * 1e-6:.1f}", f"{row['GBps']:.0f}", f"{row['percent']:.1f}"]
            cells += met(row, notes.target(row))
            if others:
                public = notes.public(row)
                cells += [f"{public['us']:g} ({public['what']})", f"{public['us'] / row['us']:.2f}"] if public else ["", ""]
            if about.get("modes"):
                other = default[(op, row["batch"], row["context"])]
                cells += [spread(other), f"{100 * (other['us'] / row['us'] - 1):+.0f} %"]
            out.append("| " + " | ".join(cells) + " |")
        out.append("")
        if op == "step_depth_cut":
            rates = ", ".join(f"{1e6 * r['batch'] / r['us']:.0f} at batch {r['batch']}" for r in rows)
            out += [f"Tokens a second: {rates}.", ""]
        low, high = min(r["percent"] for r in rows), max(r["percent"] for r in rows)
        above = ""
        if len({r["context"] for r in rows}) == 1:
            above = f"; {rows[0]['us'] - limit_us(rows[0]):.1f} us above it at batch {rows[0]['batch']}, " \
                    f"{rows[-1]['us'] - limit_us(rows[-1]):.0f} us at batch {rows[-1]['batch']}"
        out += [f"- Measured: {low:.0f} to {high:.0f} % of the limit{above}."]
        out += [f"- {where_text(note)}: {note['text']}" for note in notes.limits(op, rows)]
        out.append("")
    return out + products_text(data, notes)


def products_text(data, notes):
    """Single products beside cuBLAS, from their own list or, where they are operations, from the rows."""
    out = ["### Single dense products", "", "As a layer launches them (what is fused and added with them is named), or alone. Those without a number for cuBLAS have no counterpart.", "",
           "| product | batch | us | % | cuBLAS us | times faster |", "|---|---|---|---|---|---|"]
    measured = {(r["op"], r["batch"]): r for r in data["rows"] + data["products"]}
    for product in notes.products:
        for batch, public in product["public"].items():
            row = measured[(product["name"], int(batch))]
            cells = [product.get("title", product["name"]), batch, spread(row), f"{row['percent']:.1f}"]
            cells += [f"{public:g}", f"{public / row['us']:.2f}"] if public else ["", ""]
            out.append("| " + " | ".join(cells) + " |")
    return out + [""]


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
    """Operations of one row, counted from its shapes, a multiply-add as two."""
    batch, context = row["batch"], row["context"] or 0
    kda, mla, moe = (887_160_832 / 2, 464_388_096 / 2, 379_845_120 / 2)  # weights of the dense products
    routed = 16 * 3 * 3584 * 3072
    attend = 96 * (576 + 512) * context
    weights = {"moe_experts": routed, "dense_kda": kda, "dense_mla": mla, "dense_moe": moe, "lm_head": 163840 * 7168,
               "mla_attention": attend, "kda_fused": 96 * 128 * 128 * 4, "layer_kda_moe": kda + moe + routed,
               "layer_mla_moe": mla + moe + routed + attend,
               "step_depth_cut": 6 * (moe + routed) + 6 * kda + mla + attend + 3 * 33792 * 7168 + 163840 * 7168,
               "attnres_norm": 7168 * (9 * 3 + 2)}  # of each source its square, its score and its share; then the norm
    return 2 * batch * weights[row["op"]]


def plot(data, host, notes, folder):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "k3", "svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3})
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter, NullLocator

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / name, metadata={"Date": None})
        pyplot.close(figure)

    def contexts_of(op):
        return sorted({r["context"] or 0 for r in data["rows"] if r["op"] == op})

    def line_of(part, op, context):
        return sorted((r for r in data[part] if r["op"] == op and (r["context"] or 0) == context), key=lambda r: r["batch"])

    class Plain(LogFormatter):
        def __call__(self, x, pos=None):
            return f"{x:g}" if super().__call__(x, pos) else ""

    def plain_ticks(axis):
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(minor_thresholds=(1.2, 0.5)))

    rows, ceiling = data["rows"], data["read_ceiling_GBps"]
    colours = {op: pyplot.get_cmap("tab20")(i) for i, op in enumerate(notes.ops)}

    figure, axes = pyplot.subplots(figsize=(8, 5))
    edge = [0.3 * 1.1**i for i in range(90)]
    axes.plot(edge, [min(ceiling * 1e-3 * x, TENSOR_TFLOPS) for x in edge], color="black", label=f"{ceiling:.0f} GB/s, {TENSOR_TFLOPS} TFLOP/s")
    for op in notes.ops:
        mine = [r for r in rows if r["op"] == op]
        axes.plot([flops(r) / r["bytes"] for r in mine], [flops(r) / r["us"] * 1e-6 for r in mine], "o", ms=4, color=colours[op], label=op)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=f"Roofline, {data['gpu']}")
    axes.legend(fontsize=7, loc="lower right")
    save(figure, "roofline.svg")

    across = 3
    down = -(-(len(notes.ops) + 1) // across)  # the last place is the legend's
    figure, grid = pyplot.subplots(down, across, figsize=(11, 2.9 * down), squeeze=False)
    for axes, op in zip(grid.flat, notes.ops):
        contexts = contexts_of(op)
        for context in contexts:
            line = line_of("rows", op, context)
            drawn = axes.plot([r["batch"] for r in line], [r["us"] for r in line], "o-", ms=3, label=contexts_text(context or None))
            colour = drawn[0].get_color()
            axes.plot([r["batch"] for r in line], [limit_us(r) for r in line], ":", color=colour)
            default = line_of("default", op, context)
            axes.plot([r["batch"] for r in default], [r["us"] for r in default], "--", lw=0.8, color=colour)
            other = [(r["batch"], notes.public(r)["us"]) for r in line if notes.public(r)]
            axes.plot([o[0] for o in other], [o[1] for o in other], "x", color=colour)
        axes.set(xscale="log", yscale="log", title=op, xlabel="batch", ylabel="us")
        axes.set_xticks(notes.batches, [str(batch) for batch in notes.batches])
        axes.xaxis.set_minor_locator(NullLocator())
        plain_ticks(axes.yaxis)
        if len(contexts) > 1:
            axes.legend(fontsize=6, ncols=len(contexts), loc="lower center", bbox_to_anchor=(0.5, 0), columnspacing=0.8, handlelength=1)
            low, high = axes.get_ylim()
            axes.set_ylim(low / (high / low) ** 0.12, high)  # room for the legend
    for axes in grid.flat[len(notes.ops):]:
        axes.set_axis_off()
    for style, label in [("o-", "measured"), (":", "limit"), ("--", "default mode"), ("x", "best public")]:
        grid.flat[len(notes.ops)].plot([], [], style, ms=4, color="black", label=label)
    grid.flat[len(notes.ops)].legend(loc="center")
    save(figure, "time_batch.svg")

    figure, grid = pyplot.subplots(1, 2, figsize=(11, 4), squeeze=False)
    for axes, op in zip(grid.flat, ["mla_attention", "layer_mla_moe"]):
        for batch in notes.batches:
            line = sorted((r for r in rows if r["op"] == op and r["batch"] == batch), key=lambda r: r["context"])
            drawn = axes.plot([r["context"] for r in line], [r["us"] for r in line], "o-", ms=3, label=f"batch {batch}")
            axes.plot([r["context"] for r in line], [limit_us(r) for r in line], ":", color=drawn[0].get_color())
        axes.set(xscale="log", yscale="log", title=f"{op} (dotted: limit)", xlabel="context", ylabel="us")
        axes.set_xticks(contexts_of(op), [contexts_text(context) for context in contexts_of(op)])
        axes.xaxis.set_minor_locator(NullLocator())
        plain_ticks(axes.yaxis)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "time_context.svg")

    if host:
        figure, axes = pyplot.subplots(figsize=(10, 4.5))
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
        axes.xaxis.set_minor_locator(NullLocator())
        plain_ticks(axes.yaxis)
        axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
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
        data = check_device(load(options.results / "h200.json"), options.results / "h200.json", notes)
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
