"""The native CPU kernel of each instruction set that this machine can run, and how it is built, chosen and refused."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import npu_moe_ops
from npu_moe_ops import native, outputs, reference, routing
from npu_moe_ops.native import build

ROOT = Path(__file__).parent.parent
PROBLEMS = ROOT / "tests/native"
# The kernel for AVX512-BF16 with its one instruction spelled out, so that it is tested on CPUs without it too.
EMULATED = "avx512_bf16_emulated"
build.ISAS[EMULATED] = [*build.AVX512, "-DNPU_MOE_EMULATE_BF16_DOT"]
NEEDS = native.NEEDS | {EMULATED: native.NEEDS["avx512"]}
HERE = [isa for isa, needed in NEEDS.items() if needed <= native.cpu_flags()]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the sum of what is added up

pytestmark = pytest.mark.skipif(not HERE, reason="a CPU that the kernel is not for")


@pytest.fixture(scope="session", params=HERE)
def kernel_ops(request):
    return native.load(request.param, build.library(request.param))


@pytest.fixture(scope="session")
def kernel(kernel_ops):
    """(sorted_tokens, w13, w2, expert_cumsum, limit, alpha, beta) -> Tensor or None."""
    return kernel_ops.grouped_swiglu_ffn.default


def run(kernel, x, w13, w2, c, swiglu=(None, 1.0, 0.0)):
    y = kernel(x, w13, w2, c, *swiglu)
    assert y is not None
    assert y.is_contiguous()
    return y


def right(x, w13, w2, c, swiglu):
    """(result, what rounding may do to it) in fp64."""
    tokens, up, down = x.double(), w13.double(), w2.double()
    y, size = torch.zeros_like(tokens), torch.zeros_like(tokens)
    for e, (start, end) in enumerate(pairwise(c.tolist())):
        gate_up = tokens[start:end] @ up[e]
        h = reference.swiglu(*gate_up.chunk(2, dim=-1), *swiglu)
        y[start:end], size[start:end] = h @ down[e], 1 + h.abs() @ down[e].abs()
    return y, size


SWIGLU = st.sampled_from([(None, 1.0, 0.0), (0.7, 1.7, 1.0), (None, 1.3, -0.5), (0.0, 1.0, 0.0)])
COUNTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 5, 6, 7, 12, 13, 30, 96, 97, 200]), min_size=1, max_size=6)
SIZES = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 64, 65, 100, 128, 129, 200, 257])


@settings(max_examples=40)
@given(st.data(), COUNTS, SIZES, SIZES, SWIGLU, st.integers(0, 5))
def test_numbers(kernel, data, counts, hidden, intermediate, swiglu, tail):
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    x, w13, w2, c = cases.ffn_inputs(sum(counts) + tail, hidden, intermediate, counts, dtype)
    x, w13, w2 = (cases.MEMORY[data.draw(st.sampled_from(list(cases.MEMORY)))](t) for t in (x, w13, w2))
    y = run(kernel, x, w13, w2, c.long() if tail == 1 else c, swiglu)
    expected, size = right(x, w13, w2, c, swiglu)
    assert ((y.double() - expected).abs() <= TOLERANCE[dtype] * size).all()
    assert not y[sum(counts) :].any()
    if w13.is_contiguous() and w2.is_contiguous():
        assert torch.equal(y, run(kernel, x, cases.flat(w13), cases.flat(w2), c, swiglu))


@settings(max_examples=40)
@given(st.data(), COUNTS.filter(any), SIZES, SIZES, SWIGLU)
def test_a_rows_bits_are_its_own(kernel, data, counts, hidden, intermediate, swiglu):
    """Whatever rows are beside it, on however many threads, on every call, in either layout."""
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    x, w13, w2, c = cases.ffn_inputs(sum(counts), hidden, intermediate, counts, dtype)
    if data.draw(st.booleans()):
        w13, w2 = (cases.MEMORY["transposed"](w) for w in (w13, w2))
    y = run(kernel, x, w13, w2, c, swiglu)
    picked = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=20, unique=True).map(sorted))
    expert = torch.bucketize(torch.tensor(picked), c[1:].long(), right=True)
    some = cases.offsets(torch.bincount(expert, minlength=len(counts)).tolist())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(data.draw(st.integers(1, 5)))
        assert torch.equal(run(kernel, x, w13, w2, c, swiglu), y)
        assert torch.equal(run(kernel, x[picked], w13, w2, some, swiglu), y[picked])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_rows(kernel, dtype, bad):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"], dtype)
    y = run(kernel, x, w13, w2, c)
    x[3, 5], w13[3, 0, 0] = bad, bad  # a row of expert 1; all rows of expert 3
    got = run(kernel, x, w13, w2, c)
    touched = torch.zeros(len(x), dtype=torch.bool)
    touched[3], touched[c[3] : c[4]] = True, True
    assert torch.equal(got[~touched], y[~touched])
    assert not got[3].isfinite().any()
    expected = torch.empty_like(x)
    reference.grouped_swiglu_ffn(expected, x, w13, w2, c, None, 1.0, 0.0)
    assert torch.equal(got.isnan(), expected.isnan())


def test_rounds_as_torch_does(kernel):
    """To nearest, ties to even, through the identity: what the last product gives is what is stored."""
    exact = torch.randint(-(2**31), 2**31, (4096,)).int().view(torch.float32)
    exact = exact[exact.isfinite() & (exact.abs() < 1e3) & (exact.abs() > 1e-3)][:512].view(1, -1)
    n = exact.shape[1]
    w13 = torch.zeros(1, 1, 2)
    w13[0, 0, 0] = 30.0  # silu(30) is 30 to the last bit
    w13[0, 0, 1] = 1 / 32
    w2 = exact.view(1, 1, n)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.zeros(1, n, dtype=dtype)
        x[0, 0] = 1.0
        up = torch.zeros(1, n, 2, dtype=dtype)
        up[0, 0] = w13[0, 0].to(dtype)
        down = w2.to(dtype)
        y = run(kernel, x, up, down, cases.offsets([1]))
        h = (torch.tensor(30.0) * (1 / 32)).to(dtype).float()
        assert torch.equal(y, (h * down[0].float()).to(dtype))


def test_leaves_alone_what_is_not_for_it(kernel):
    x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
    for args in (
        (x.double(), w13.double(), w2.double(), c),
        (x, w13.double(), w2, c),
        (x, w13, w2, c.float()),
        (x, w13, w2, c[1:]),
        (x, w13, w2, c + 1),
        (x, w13, w2, c.flip(0)),
        (x, w13, w2, c * 2),
        (x[0], w13, w2, c),
        (x, w13[..., 1:], w2, c),
        (x, w13.transpose(1, 2), w2, c),
        (x, w13, w2[..., 1:], c),
        (x.to("meta"), w13, w2, c),
        (x.to_sparse(), w13, w2, c),
        (None, w13, w2, c),
    ):
        assert kernel(*args, None, 1.0, 0.0) is None
    for swiglu in ((-1.0, 1.0, 0.0), (torch.nan, 1.0, 0.0), (None, torch.inf, 0.0), (None, 1.0, torch.nan)):
        assert kernel(x, w13, w2, c, *swiglu) is None


def test_inside_a_parallel_region_and_after_a_fork(kernel):
    x, w13, w2, c = cases.ffn_inputs(300, 64, 64, (300,))
    y = run(kernel, x, w13, w2, c)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a forked child of an OpenMP program has no other threads
        os._exit(0 if torch.equal(run(kernel, x, w13, w2, c), y) else 1)
    assert os.waitpid(child, 0)[1] == 0


@st.composite
def routers(draw):
    """Whole numbers as logits, through the identity: with many equals, and the same on every path."""
    groups, size = draw(st.sampled_from([(1, 1), (1, 12), (4, 3), (2, 16), (6, 1)]))
    experts, kept = groups * size, draw(st.integers(1, groups))
    top_k = draw(st.integers(1, kept * size))
    x = torch.randint(-3, 4, (draw(st.integers(0, 40)), experts)).float()
    if len(x) and draw(st.booleans()):
        x[draw(st.integers(0, len(x) - 1)), draw(st.integers(0, experts - 1))] = torch.nan
    bias = torch.randint(-2, 3, (experts,)) / 4
    bias[torch.rand(experts) < 0.1] = -torch.inf
    scoring, renormalize = draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.booleans())
    bias = draw(st.sampled_from([None, bias]))
    return x, torch.eye(experts), bias, top_k, scoring, groups, kept, renormalize, 2.5


@settings(max_examples=100)
@given(routers(), st.sampled_from(list(TOLERANCE)))
def test_router_chooses_as_in_torch(kernel_ops, args, dtype):
    x, weight, bias, top_k, scoring, groups, kept, renormalize, factor = args
    x, weight = x.to(dtype), weight.to(dtype)
    here, there = (outputs.topk_router(x, weight, bias, top_k) for _ in range(2))
    options = groups, kept, scoring == "softmax", renormalize, factor
    assert kernel_ops.topk_router.default(x, weight, bias, *options, *here)
    routing.topk_router(there, x, weight, bias, top_k, scoring, groups, kept, renormalize, factor)
    assert torch.equal(here[1], there[1])
    torch.testing.assert_close(here[0], there[0], equal_nan=True)
    torch.testing.assert_close(here[2], there[2], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30)
@given(st.data(), st.integers(1, 200), SIZES, SIZES, st.sampled_from(list(TOLERANCE)))
def test_a_tokens_routing_is_its_own(kernel_ops, data, tokens, hidden, experts, dtype):
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(experts, hidden).to(dtype)
    picked = data.draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=20))
    found = []
    threads = torch.get_num_threads()
    try:
        for some in (x, x[picked]):
            torch.set_num_threads(data.draw(st.integers(1, 4)))
            result = outputs.topk_router(some, weight, None, min(8, experts))
            assert kernel_ops.topk_router.default(some, weight, None, 1, 1, True, True, 1.0, *result)
            found.append(result)
    finally:
        torch.set_num_threads(threads)
    for all_tokens, some in zip(*found, strict=True):
        assert torch.equal(all_tokens[picked], some)


@settings(max_examples=50)
@given(st.data(), st.integers(0, 60), st.integers(0, 9), SIZES, st.sampled_from(list(TOLERANCE)))
def test_permute_and_unpermute_as_in_torch(kernel_ops, data, tokens, top_k, hidden, dtype):
    experts = data.draw(st.sampled_from([1, 3, 8, 300]))
    x, ids = torch.randn(tokens, hidden).to(dtype), torch.randint(-1, experts + 1, (tokens, top_k))
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    here, there = (outputs.permute(x, ids, experts) for _ in range(2))
    assert kernel_ops.permute.default(x, ids, experts, *here)
    routing.permute(there, x, ids, experts)
    for ours, theirs in zip(here, there, strict=True):
        assert torch.equal(ours, theirs)
    rows, weights = torch.randn(tokens * top_k, hidden).to(dtype), torch.randn(tokens, top_k)
    one, two = (outputs.unpermute(rows, here[2], weights) for _ in range(2))
    assert kernel_ops.unpermute.default(rows, here[2], weights, one)
    routing.unpermute(two, rows, here[2], weights)
    torch.testing.assert_close(one, two)


SANITIZED = [("ffn", isa) for isa in HERE] + [("routing", isa) for isa in HERE[:1]]
FOR_ARM = shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")
EMULATED_ARM = ["ffn", "routing"] if FOR_ARM else []


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """(kernel file, instruction set) -> a future of its test program; instrumented ones compile for a minute."""
    folder = tmp_path_factory.mktemp("programs")
    sanitizers = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    wanted = {(name, isa): (build.compiler(), *build.ISAS[isa], *sanitizers) for name, isa in SANITIZED}
    wanted |= {(name, "neon"): ("aarch64-linux-gnu-g++", "-O2", "-static") for name in EMULATED_ARM}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            (name, isa): pool.submit(compiled, name, folder / f"{name}-{isa}", *command)
            for (name, isa), command in wanted.items()
        }


def compiled(name, program, compiler, *flags):
    common = [flag for flag in build.COMMON if not flag.startswith("-O")]
    sources = [build.SOURCES / f"{name}.cpp", PROBLEMS / f"{name}_test.cpp"]
    command = [compiler, *common, *build.WARNINGS, "-Werror", *flags, *sources, "-o", program, "-pthread"]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize(("name", "isa"), SANITIZED)
def test_no_byte_outside_is_touched(name, isa, programs):
    """Under AddressSanitizer and UndefinedBehaviorSanitizer, between guard pages."""
    check_problems([programs[name, isa].result()], os.environ | {"ASAN_OPTIONS": "detect_leaks=0"})


@pytest.mark.skipif(not FOR_ARM, reason="needs g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("name", ["ffn", "routing"])
def test_neon_under_emulation(name, programs):
    check_problems(["qemu-aarch64", programs[name, "neon"].result()], os.environ)


def check_problems(command, environment):
    start = str(torch.randint(10**6, ()).item())
    done = subprocess.run([*command, start, "40"], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "40 problems\n"), done.stdout + done.stderr


# How it is built, chosen and refused: in processes of their own.

SHOW = """
import json, torch, npu_moe_ops, sys
sys.path.append({tests!r})
import cases
x, w13, w2, c = cases.ffn_inputs(*cases.SHAPES["mixed"])
y = npu_moe_ops.grouped_swiglu_ffn(x, w13, w2, c)
print(json.dumps([npu_moe_ops.backend_info()["cpu"]["float32"], y.double().abs().sum().item() > 0]))
"""


def process(**environment):
    script = SHOW.format(tests=str(ROOT / "tests"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NPU_MOE_")} | environment
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def outcome(running):
    stdout, stderr = running.communicate()
    assert running.returncode == 0, stderr
    info, computed = json.loads(stdout)
    assert computed
    return info, stderr


def test_processes_share_one_build(tmp_path):
    isa = HERE[-1] if HERE[-1] != EMULATED else HERE[-2]
    fake = tmp_path / "c++"  # counts its calls, and leaves the work to the real one
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec {build.compiler()} -O0 "$@" -O0\n')
    fake.chmod(0o755)
    cache = tmp_path / "cache"
    running = [process(NPU_MOE_CPU=isa, NPU_MOE_CACHE=str(cache), CXX=str(fake)) for _ in range(3)]
    found = [outcome(each) for each in running]
    assert all(info.startswith(f"native kernel, {isa}") for info, _ in found)
    assert sum("compiling its CPU kernel" in stderr for _, stderr in found) == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == 4  # three sources and the link
    (library,) = cache.glob("*.so")
    library.parent.chmod(0o500)  # a read-only cache that has it is enough
    info, stderr = outcome(process(NPU_MOE_CPU=isa, NPU_MOE_CACHE=str(cache), CXX="/no/compiler"))
    assert info == f"native kernel, {isa}, {library}"
    assert stderr == ""


def test_without_a_compiler_torch_does_it(tmp_path):
    info, stderr = outcome(process(NPU_MOE_CACHE=str(tmp_path), CXX="/no/compiler"))
    assert info == "torch: no C++ compiler was found; install g++ or clang++, or set CXX to one"
    assert stderr == ""


def test_a_compiler_that_fails(tmp_path):
    info, _ = outcome(process(NPU_MOE_CACHE=str(tmp_path), CXX="false"))
    assert info.startswith("torch: ")
    assert "false failed with 1" in info
    assert not list(tmp_path.glob("*.so"))


def test_a_folder_that_others_may_write_to(tmp_path):
    tmp_path.chmod(0o777)
    info, _ = outcome(process(NPU_MOE_CACHE=str(tmp_path)))
    assert info.startswith("torch: there is no folder to build in: ")
    assert "anybody may write to it; set NPU_MOE_CACHE to one" in info


def test_the_environment_chooses(tmp_path):
    assert outcome(process(NPU_MOE_CPU="torch", NPU_MOE_CACHE=str(tmp_path)))[0] == "torch: NPU_MOE_CPU=torch"
    for value, message in (
        ("fast", "ValueError: NPU_MOE_CPU must be auto, torch or one of avx512_bf16, avx512, avx2, neon, got 'fast'"),
        ("neon" if "neon" not in HERE else "avx2", "RuntimeError: NPU_MOE_CPU="),
    ):
        running = process(NPU_MOE_CPU=value, NPU_MOE_CACHE=str(tmp_path))
        _, stderr = running.communicate()
        assert running.returncode == 1
        assert message in stderr


def test_backend_info():
    info = npu_moe_ops.backend_info()
    assert set(info) == {"cpu", "npu", "others"}
    assert info["cpu"]["float64"] == "torch, expert by expert in fp64"
    assert {info["cpu"][str(d).removeprefix("torch.")] for d in native.DTYPES} == {native.describe()}
    assert "PyPTO kernel" in info["npu"]["bfloat16"]
