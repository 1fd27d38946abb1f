#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench/report.py: a page with the numbers of a results file, and no page from a malformed one. Called with the source
# root.
set -euo pipefail
root=$1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/whole"
cp "$root"/tests/bench/data/*.json "$scratch/whole/"
# The rows of h200.json that the page is searched for, and one at half of its limit for each other that there must be.
python3 - "$root/bench" "$scratch/whole/h200.json" <<'END'
import json, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
import report
with open(sys.argv[2]) as file:
    data = json.load(file)
notes = report.Notes(report.load(sys.argv[1] + "/notes.json"), "notes.json")
for part, wanted in notes.required().items():
    there = {(r["op"], r["batch"], r["context"]) for r in data[part]}
    for op, batch, context in wanted:
        if (op, batch, context) in there:
            continue
        row = {"op": op, "batch": batch, "context": context, "us": 100.0 * batch}
        row["us"] = 2 * report.math_us(row) or row["us"]
        row |= {"us_spread": 1.0, "bytes": 2225e3 * row["us"], "GBps": 2225.0, "percent": 50.0}
        data[part].append(row)
with open(sys.argv[2], "w") as file:
    json.dump(data, file)
END
cp "$scratch"/whole/*.json "$scratch/"
page=$scratch/page.md
printf '# Title\n\n%s\n\nOutdated.\n\n%s\n\nThe rest.\n' \
  '<!-- results: written by bench/report.py -->' '<!-- end of results -->' >"$page"

# A device row's notes come from the project's own file, so that it is checked too.
report() { python3 "$root/bench/report.py" --results "$scratch" --page "$page" --no-plots "$@"; }
contains() { grep -qF -- "$1" "$page" || { echo "the page has no: $1"; cat "$page"; exit 1; }; }

report
contains '# Title'
contains 'The rest.'
contains 'NVIDIA H200, 2026-01-02. Plain read 4450 GB/s, copy 4270 GB/s (read and written) in the last program'
contains '| 1 | 70.5 ± 0.4 | 63.1 | 280.8 | 3982 | 89.5 | ≤ 72 us | met'\
' | 132.6 (Marlin MXFP4 with activation and weighted sum) | 1.88 |'
contains '| 8 | 545.2 ± 2.7 | 473.2 | 2105.7 | 3862 | 86.8 | ≤ 530 us | not met |'
contains '| 8 | 32k | 111.0 ± 0.6 | 73.0 | 302.0 | 2721 | 65.8 | ≤ 90 us | not met'\
' | 114 (FlashMLA) | 1.03 | 122.1 ± 0.6 | +10 % |'
contains '| 1 | 4k | 300.0 ± 1.5 | 253.9 | 1129.8 | 3766 | 84.6 | ≥ 84 % | met | 100.0 ± 0.5 | -67 % |'
contains ', 2336 at batch 32, '
contains '| MLA q_b, 18432x1536 | 1 | 14.5 ± 0.2 | 85.8 | 16.7 | 1.15 |'
contains '| KDA f_b, 12288x128 | 1 | 100.0 ± 0.5 | 50.0 |  |  |'
contains 'A processor, 2026-01-02. Plain read over 512 MB: 12.5 GB/s with 1 thread, 24.0 GB/s with 2 threads.'
contains '| linear bf16 | 7168x7168 B=1 | 9876.5 | 5000.0 | 20.6 | 10.3 | 86 |'
contains '| 3 layers, 40.6 GB | all, the resident decoder | 1792 | 526.7 | 2.9 |  |  |  | 526.8 |'
contains '| 3 layers, 40.6 GB | 0.9 % | 16 | 74.1 | 52.0 | 41.6 | 76 % | 0.2 % |  |'
contains '| 3 layers, 1792 experts of 17.55 MB | 55.1 | 78.4 | 54.1 | 98 % |'
if grep -qF 'Outdated.' "$page"; then echo 'the old results are still there'; exit 1; fi
cp "$page" "$scratch/good.md"
report
cmp "$page" "$scratch/good.md"

# Each of these must be refused with a message, the page untouched.
refused() {  # file, what to do with `d`, part of the message
  python3 - "$scratch/$1" "$2" <<'END'
import json, sys
with open(sys.argv[1]) as file:
    d = json.load(file)
exec(sys.argv[2])
with open(sys.argv[1], "w") as file:
    json.dump(d, file)
END
  local status=0
  report >"$scratch/out" 2>&1 || status=$?
  if [ $status != 1 ] || ! grep -qF -- "$3" "$scratch/out"; then
    echo "not refused as '$3': $2"
    cat "$scratch/out"
    exit 1
  fi
  cmp "$page" "$scratch/good.md"
  cp "$scratch/whole/$1" "$scratch/$1"
}
refused h200.json 'd["read_ceiling_GBps"] = 4299' 'does not count'
refused h200.json 'del d["copy_GBps"]' 'no copy_GBps'
refused h200.json 'd["rows"] = []' 'no rows'
refused streaming.json 'd["checkpoints"] = []' 'no checkpoints'
refused streaming.json 'del d["checkpoints"][0]["copies_GBps"]' 'checkpoint 0: copies_GBps'
refused streaming.json 'd["checkpoints"][0]["decoding"][1]["same_tokens"] = False' 'other tokens at 0.89 %'
refused h200.json 'd["rows"][0]["op"] = "moe"' 'unknown: moe at batch 1'
refused h200.json 'd["rows"][2]["context"] = 8192' 'unknown: kda_fused at batch 1, context 8192'
refused h200.json 'del d["rows"][2]' 'nothing about kda_fused at batch 1'
refused h200.json 'del d["default"][0]' 'default: nothing about mla_attention at batch 8, context 32768'
refused h200.json 'del d["products"][0]' 'products: nothing about MLA q_b 18432x1536 at batch 1'
refused h200.json 'del d["default"]' 'no default'
refused h200.json 'd["rows"][0]["extra"] = 1' 'its keys are not'
refused h200.json 'del d["rows"][1]["us_spread"]' 'its keys are not'
refused h200.json 'd["rows"][0]["batch"] = 0' 'batch 0'
refused h200.json 'd["rows"][0]["us"] = float("nan")' 'us nan'
refused h200.json 'd["rows"][0]["us"] = "70"' "us '70'"
refused h200.json 'd["rows"][0]["GBps"] *= 1.1' 'GBps'
refused h200.json 'd["rows"][0]["percent"] = 79.0' 'percent 79.0'
refused h200.json 'd["rows"][0]["percent"] = 94.0' 'below 4300'
refused h200.json 'd["rows"][3]["percent"] = 60.0' 'percent 60.0'
refused h200.json 'd["rows"][3]["context"] = None' 'without a context'
refused h200.json 'd["rows"].append(d["rows"][0])' 'twice'
refused h200.json 'r = d["rows"][0]; r["us"] /= 2; r["GBps"] *= 2; r["percent"] *= 2' 'of what the memory gives'
refused host.json 'd["rows"][0]["threads"] = "all"' 'threads'
refused host.json 'del d["cpu"]' 'keys missing'
refused host.json 'del d["rows"][1]["ceiling_GBps"]' 'its keys are not'
refused host.json 'd["rows"][1]["ceiling_GBps"] = 12.5' 'percent 85.64'
refused host.json 'd["rows"][0]["ceiling_GBps"] = 0' 'ceiling_GBps 0'
echo '{"gpu": ' >"$scratch/h200.json"
if report >/dev/null 2>&1; then echo 'half a file was taken'; exit 1; fi
cp "$scratch/whole/h200.json" "$scratch/"

# Every row needs a sentence on what limits it.
python3 - "$root/bench/notes.json" "$scratch/notes.json" <<'END'
import json, sys
with open(sys.argv[1]) as file:
    notes = json.load(file)
notes["ops"]["kda_fused"]["limits"] = []
with open(sys.argv[2], "w") as file:
    json.dump(notes, file)
END
if report --notes "$scratch/notes.json" >"$scratch/out" 2>&1; then echo 'a row without a limit was taken'; exit 1; fi
grep -qF 'no sentence says what limits kda_fused at batch 1' "$scratch/out"

if python3 -c 'import matplotlib' 2>/dev/null; then
  python3 "$root/bench/report.py" --results "$scratch" --page "$page"
  for plot in roofline time_batch time_context host_threads; do
    grep -q '<svg' "$scratch/$plot.svg" || { echo "no $plot.svg"; exit 1; }
  done
fi
echo 'the page has the numbers, and malformed results are refused'
