#!/usr/bin/env bash
# Build the extension with a sanitizer, in a folder of its own, and run the tests of the kernels with it.
#
#   tools/sanitize.sh address      memory errors and undefined behaviour (ASan, UBSan)
#   tools/sanitize.sh thread       data races (TSan)
#   tools/sanitize.sh address tests/test_ops.py -k conv     other tests, as for pytest
#
# Needs GCC with its sanitizers, CMake, nanobind, and what the tests need. BUILD says where to build.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:?address or thread}
shift
case $kind in
address) flags="-fsanitize=address,undefined -fno-sanitize=vptr,alignment,object-size -fno-sanitize-recover=undefined" library=libasan.so ;;
# libgomp is not instrumented: with it every loop on several threads would look like a race.
thread) flags="-fsanitize=thread -DREWIRE_OWN_THREADS" library=libtsan.so ;;
*) echo "address or thread, not $kind" >&2 && exit 2 ;;
esac
tests=("$@")
if [ ${#tests[@]} = 0 ]; then
    tests=(tests/test_ops.py tests/test_ops_refusals.py tests/test_native_sampling.py tests/test_engine_kernels.py
        tests/test_engine_native.py tests/test_layer_norm_kernels.py tests/test_rows.py tests/test_strips.py
        tests/test_columns.py tests/test_layers.py tests/test_sampling.py tests/test_connections.py
        tests/test_hostile_indices.py tests/test_hostile_state.py tests/test_hostile_native.py)
fi

build=${BUILD:-$PWD/build/sanitize-$kind}
python=$(command -v python)
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE="$python" \
    -DCMAKE_CXX_FLAGS="$flags -O1 -g1 -fno-omit-frame-pointer"
cmake --build "$build" --parallel "$(nproc)"
mkdir -p "$build/src"
cp -r src/rewire "$build/src/"
rm -f "$build"/src/rewire/_native*.so
cp "$build"/_native*.so "$build/src/rewire/"

# Python and torch hold memory until they end; what they do is not looked at.
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:report_signal_unsafe=0
export LD_PRELOAD="$(gcc -print-file-name=$library) $(gcc -print-file-name=libstdc++.so)"
export PYTHONPATH=$build/src
exec "$python" -m pytest -p no:cacheprovider "${tests[@]}"
