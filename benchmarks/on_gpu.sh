#!/usr/bin/env bash
# Measures a GPU in parts of at most three minutes each, the most valuable part first.
#
#     benchmarks/on_gpu.sh benchmarks/results/on_gpu
#     DEVICE=cpu benchmarks/on_gpu.sh /tmp/tried      # small sizes, to see that all parts run
#
# Each part writes PART.log, and speed.py also PART.json. Another run goes on where this one ended: a part
# that has ended well has a file PART.done, and is left out.
set -uo pipefail
mkdir -p "$1"
out=$(cd "$1" && pwd) device=${DEVICE:-cuda}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Schemes for which the project has goals on a GPU, one for each kernel first; and a model of 130 million parameters.
wanted=(--schemes kerple fire fox cope stick_breaking rope alibi grape_a t5 sandwich)
large=(--hidden 640 --layers 28)
# Measurements end by themselves, and give what they have.
last=(--device "$device" --seconds 110) chosen=(-m gpu)
# The later of two options counts.
if [[ $device == cpu ]]; then
  last+=(--lengths 64 --schemes kerple t5 --rounds 1 --hidden 256 --layers 2)
  chosen=(-m "not gpu and not slow" -k "kerple and sinks")
fi

part() {
  local name=$1 begin=$SECONDS
  [[ -e $out/$name.done ]] && return
  timeout -k 5 180 python "${@:2}" >"$out/$name.log" 2>&1
  local code=$?
  ((code)) || touch "$out/$name.done"
  echo "$name: exit code $code after $((SECONDS - begin)) s"
}
speed() { part "$1" benchmarks/speed.py "${@:2}" "${last[@]}" --output "$out/$1.json"; }
tests() { part "$1" -m pytest -q -p no:cacheprovider "${chosen[@]}" "$2"; }

tests kernels tests/test_gpu_executors.py
speed op_16384 op --lengths 16384 "${wanted[@]}"
speed step_1024 step --lengths 1024 "${wanted[@]}" "${large[@]}"
speed op_4096 op --lengths 4096 "${wanted[@]}"
speed op_1024 op --lengths 1024 "${wanted[@]}"
speed step_8192 step --lengths 8192 "${wanted[@]}" "${large[@]}"
speed decode_2048 decode --lengths 2048 "${wanted[@]}" "${large[@]}"
speed op_32768 op --lengths 32768 "${wanted[@]}"
# The other schemes may have no kernel: blocks at the lengths above would take longer than a part may.
speed op_all op --lengths 2048
tests models tests/test_gpu_models.py
