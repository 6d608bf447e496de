# /// script
# dependencies = ["nox>=2024.10.9"]
# ///
"""The project's sessions: `nox -l` lists them, `nox -s NAME` sets one up and runs it."""

import importlib.util
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"  # pip finds wheels beside the index; not every backend does
nox.options.reuse_existing_virtualenvs = True

TORCH = "torch==2.13.0"  # of the test environment; the library itself takes a wide range
VLLM = "vllm==0.33.0"  # as qload/engines/vllm/hooks.py says
PYPROJECT = nox.project.load_toml("pyproject.toml")
# The lines of pip that announce more than a moment's work.
STEPS = re.compile(
    r"(?!.*: finished)\s*((?:Downloading|Using cached) .*[MG]i?B\)|(?:Building wheel|Installing) .*)"
)
ROOT = Path(__file__).parent
PAGES = ("*.md", "LICENSE", "csrc/*.md", "docs/**/*.md")  # of the site
PIP = {"PIP_COMPILE": "0"}  # who imports a module compiles it, and few ever are
NATIVE = ("tests/native", "tests/layouts", "tests/formats")  # what stands on native code
CALLERS = ("tests/kernels", "tests/experts", "tests/repacking")  # what takes it where there is some


def install(session: nox.Session, *groups: str, **variables: str) -> None:
    """The library without a compiler, the pinned torch, and the groups of pyproject.toml."""
    needs = nox.project.dependency_groups(PYPROJECT, *groups)
    session.log(
        f"setting up {TORCH}, what it needs, and qload; files of more than 1 MB are named with their size"
    )
    fetch(session, TORCH, *needs, ".", QLOAD_PYTHON_ONLY="1", **variables)


def keep_bytecode(session: nox.Session) -> None:
    """What a process compiles, the next one reads, also where the tree is to have no bytecode in it.

    Without it each of the hundreds of processes that tests start compiles all of torch that it imports.
    """
    folder = Path(session.virtualenv.location).resolve() / "bytecode"
    session.env.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(folder))


def fetch(session: nox.Session, *needs: str, **variables: str) -> None:
    """`pip install`, with a line for each step that takes long; all that pip said, if it fails."""
    env = {**PIP, "PIP_PROGRESS_BAR": "off", **variables}  # which backends other than pip ignore
    reading, writing = os.pipe()
    with open(reading, errors="replace") as said, ThreadPoolExecutor() as pool:
        lines = pool.submit(show_steps, session, said)
        try:
            with open(writing, "w") as pip:  # closed when pip is done, which ends the reading
                session.install(*needs, env=env, silent=False, stdout=pip)
        except CommandFailed:
            sys.stderr.write(lines.result())
            raise


def show_steps(session: nox.Session, said: Iterable[str]) -> str:
    """Log the lines of pip that are STEPS as they come; return all lines."""
    lines = []
    for line in said:
        lines.append(line)
        if step := STEPS.match(line):
            session.log(step[1])
    return "".join(lines)


@nox.session
def unit(session: nox.Session) -> None:
    """The tests that need no GPU and no compiler; those that take seconds each with `-- -m slow`."""
    keep_bytecode(session)
    install(session, "test")
    session.run("pytest", "-m", "not gpu and not slow", "-n", "2", *session.posargs)


@nox.session(default=False)
def native(session: nox.Session) -> None:
    """The CPU module: under each instruction set of this machine, in what calls it, under sanitizers."""
    keep_bytecode(session)
    build(session, "test")
    found = session.run("python", "-c", "from qload import native; print(*native.available())", silent=True)
    options = ("-n", "2", *session.posargs)
    for isa in str(found).split():
        some = ("-m", "not gpu", "--hypothesis-profile=some")
        session.run("pytest", *NATIVE, *some, *options, env={"QLOAD_ISA": isa})
    session.run("pytest", *CALLERS, "-m", "not gpu and not slow", *options)
    sanitized = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
    build(session, CXXFLAGS=f"{sanitized} -DEMULATED_TILES")  # so that all machines try AMX's products
    runtimes = (
        session.run(os.environ.get("CXX", "c++"), f"-print-file-name={name}", external=True, silent=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")  # before python, which knows none of them
    )
    preload = " ".join(str(path).strip() for path in runtimes)
    asan = "detect_leaks=0:malloc_context_size=5"  # longer stacks of allocations take their time
    session.run("pytest", "tests/native", "-n", "2", env={"LD_PRELOAD": preload, "ASAN_OPTIONS": asan})
    read_files(session)


@nox.session(default=False)
def compile(session: nox.Session) -> None:
    """Layers of every format through Inductor, torch's compiler, on the CPU; needs a C++ compiler."""
    keep_bytecode(session)
    install(session, "test")
    session.run("pytest", "tests/compile/modules.py", "-n", "2", "--show-capture=no", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """The CPU code beside a copy, peers, more `-- peers`; its table `-- --dispatch`; loads `-- engines`."""
    if session.posargs[:1] == ["engines"]:
        install(session, "test", "transformers")
        session.run("python", "-m", "tests.bench.engines", *session.posargs[1:])
        return
    build(session)
    if session.posargs[:1] == ["--dispatch"]:
        session.run("python", "-m", "tests.bench.cpu_dispatch", *session.posargs[1:])
        return
    of_linears = session.posargs[:1] == ["peers"]
    peers = (
        ("torchao", "bitsandbytes", "llama-cpp-python")
        if of_linears
        else ("compressed-tensors", "bitsandbytes")
    )
    for peer in peers:  # what is not to be had is left out of the table
        session.run("python", "-m", "pip", "install", "--quiet", TORCH, peer, success_codes=[0, 1])
    if of_linears:
        session.run("python", "-m", "tests.bench.cpu_linear", "--peers", *session.posargs[1:])
        return
    session.run("python", "-m", "tests.bench.cpu", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tests.bench.cpu_linear")
        session.run("python", "-m", "tests.bench.cpu_experts")
        session.run("python", "-m", "tests.bench.large")


def read_files(session: nox.Session) -> None:
    """Threads that read files, to no device those of the CUDA module, under sanitizers."""
    of_cuda, of_cpu = "tests/native/file_reader", "tests/native/file_mover"
    parts = [
        "shared/digits",
        *(f"cpu/{part}" for part in ["file_mover", "file_move", "move", "plan", "route", "team"]),
    ]
    programs = {of_cuda: ["csrc/cuda/copy/file_reader.cpp"], of_cpu: [f"csrc/{part}.cpp" for part in parts]}
    program = f"{session.create_tmp()}/files"
    for (folder, sources), sanitizer in product(programs.items(), ("thread", "address,undefined")):
        flags = f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"
        options = "-std=c++17", "-O1", "-g1", "-pthread", *flags, f"-I{folder}", *sources, f"{folder}/run.cpp"
        session.run(os.environ.get("CXX", "c++"), *options, "-ldl", "-o", program, external=True)
        session.run(program, env={"TSAN_OPTIONS": "halt_on_error=1"}, external=True)


def build(session: nox.Session, *groups: str, **flags: str) -> None:
    """The CPU module alone, into an editable install."""
    needs = nox.project.dependency_groups(PYPROJECT, "build", *groups)
    session.install("--quiet", TORCH, *needs, *PYPROJECT["project"]["dependencies"], env=PIP)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--force-reinstall")
    session.install(*options, "--editable", ".", env={**PIP, "QLOAD_CUDA": "0", **flags})


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build the sdist and both wheels into dist/, check them as an index would, test what they hold."""
    session.install("--quiet", TORCH, *nox.project.dependency_groups(PYPROJECT, "dist"))
    session.install("--quiet", *PYPROJECT["project"]["dependencies"])
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "--outdir", str(folder))
    tree = unpacked(next(folder.glob("*.tar.gz")), Path(session.create_tmp()).resolve())
    for asked in ({"QLOAD_PYTHON_ONLY": "1"}, {"QLOAD_CUDA": "0"}):
        session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), str(tree), env=asked)
    session.run("twine", "check", "--strict", *map(str, folder.iterdir()))
    for wheel in sorted(folder.glob("*.whl"), reverse=True):  # the native one last: it is what the tests use
        session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))
        session.run("qload", "doctor", "--table")
    session.chdir(tree)
    session.run("pytest", "tests/meta", "-q", *session.posargs)
    shutil.rmtree(tree / "qload")  # from here on `qload` is the wheel's
    session.run("pytest", "tests/formats", "tests/native", "-m", "not gpu", "-n", "2", "-q", *session.posargs)


def unpacked(archive: Path, folder: Path) -> Path:
    """The one folder that an sdist holds, laid out afresh."""
    tree = folder / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(tree, ignore_errors=True)
    with tarfile.open(archive) as held:
        held.extractall(folder, filter="data")
    return tree


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """transformers' models on qload; tables, routing and experts against its own, at one version."""
    keep_bytecode(session)
    install(session, "test", "transformers")
    tables = (f"tests/transformers/{name}.py" for name in ("tables", "routing", "experts"))
    names = ("whole", "others", "settings", "adapters", "sharing", "mistakes", "files", "page")
    engine = (f"tests/engines/transformers/{name}.py" for name in names)
    session.run("pytest", *tables, *engine, "-n", "2", *session.posargs)
    busy = (f"tests/engines/transformers/{name}.py" for name in ("processes", "compiled"))
    session.run("pytest", *busy, *session.posargs)  # of two and four processes, and of as many compilers


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Models of every type and format, and their layers, on worlds of one to eight; transformers' models."""
    keep_bytecode(session)
    install(session, "test", "transformers")
    layers = ("tests/models/parallel_layers.py", "tests/models/parallel_ends.py")
    files = ("tests/models/with_transformers", *layers, "tests/parallel/processes.py")
    session.run("pytest", "-o", "python_files=*.py", *files, "-n", "2", *session.posargs)


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Models in vLLM's own classes on a CPU: its wheel of one version, without the shared libraries in it."""
    folder = Path(session.create_tmp()).resolve()
    download = ("python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
    session.run(*download, VLLM, success_codes=[0, 1])  # 340 MB, for the platforms that it is built for
    wheel = next(folder.glob("vllm-*.whl"), None)
    if wheel is None:
        session.skip(f"no wheel of {VLLM} is to be had for this machine")
    keep_bytecode(session)
    install(session, "test", "transformers", "vllm")
    session.run("python", "-m", "tests.engines.vllm.wheel", str(wheel))
    files = (f"tests/engines/vllm/{name}.py" for name in ("models", "ends", "parts", "generate"))
    session.run("pytest", *files, "tests/outsiders/vllm_repacks.py", *session.posargs)


@nox.session(default=False)
def outsiders(session: nox.Session) -> None:
    """Other projects' packers, dequantizers and products, put on trial by the public suites, on the CPU."""
    keep_bytecode(session)
    install(session, "test", "transformers", "outsiders")
    session.run("pytest", "-o", "python_files=*.py", "tests/outsiders", "-n", "2", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff, its formatter, and mypy in strict mode."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session(default=False)
def golden(session: nox.Session) -> None:
    """Rewrite golden/. Then read the diff: each line of it is a decision."""
    install(session, "test")
    session.run("pytest", "-m", "not gpu", "--snapshot-update", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Verify the real checkpoints under fixtures/, then damaged copies of them, and show what is found."""
    install(session)
    session.run("python", "-m", "tests.demo", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site of documentation into build/docs/site; a broken link or an unknown name fails it."""
    session.install("--quiet", *nox.project.dependency_groups(PYPROJECT, "docs"), env=PIP)
    pages = ROOT / "build" / "docs" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for pattern in PAGES:  # where they stand in the repository, so that links between them hold
        for page in ROOT.glob(pattern):
            place = pages / page.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, place)
    build = ("mkdocs", "build", "--strict", "--quiet", "--config-file", "docs/mkdocs.yml")
    session.run(*build, *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Break the product on purpose, one seeded fault at a time, and print which tests die."""
    install(session, "test")
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Change one operator, number or condition at a time, 400 of them, and count which the tests notice."""
    install(session, "test", "mutants")
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """A million broken headers and 20,000 broken folders: only qload's errors, none over a second."""
    install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session(default=False)
def cases(session: nox.Session) -> None:
    """Every case of a foreign folder, against its owner's numbers: `QLOAD_CASES=DIR nox -s cases`."""
    folder = os.environ.get("QLOAD_CASES")
    if not folder or not Path(folder).is_dir():
        session.error(f"QLOAD_CASES has to name a folder with an index.json of cases; it is {folder!r}")
    install(session, "test")
    session.run("pytest", "tests/cases", "-m", "not gpu", *session.posargs)


def build_cuda(session: nox.Session, archs: str = "") -> None:
    """The CUDA module, put where this checkout looks for it; needs cmake, ninja, nvcc and pybind11."""
    folder = ROOT / "build" / "cuda"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DQLOAD_CUDA_ARCHS={archs}"]
    session.run("cmake", "-S", "csrc/cuda", "-B", str(folder), "-G", "Ninja", *options, external=True)
    session.run("cmake", "--build", str(folder), external=True)
    session.run("cmake", "--install", str(folder), "--prefix", str(ROOT), external=True)


def has_gpu(session: nox.Session) -> bool:
    """Whether this environment has torch and this machine a GPU; the one without the other is an error."""
    if importlib.util.find_spec("torch") is not None:
        return shutil.which("nvidia-smi") is not None
    if shutil.which("nvidia-smi"):
        session.error("there is a GPU, and this environment has no torch to test it with")
    return False


@nox.session(default=False, venv_backend="none")
def cuda_build(session: nox.Session) -> None:
    """Compile the CUDA module for every architecture, or those of QLOAD_CUDA_ARCHS, and run nothing."""
    build_cuda(session, os.environ.get("QLOAD_CUDA_ARCHS", ""))


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Build the CUDA module and run the tests that need a device, in the environment that is there."""
    if not has_gpu(session):
        session.skip("this environment has no torch, or this machine no GPU")
    if shutil.which("nvcc"):
        build_cuda(session, "native")
    session.run(sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-rs", *session.posargs)


@nox.session(default=False, venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """Small shapes of every CUDA operator under compute-sanitizer: memory, races, what was never written."""
    if not has_gpu(session) or not shutil.which("compute-sanitizer"):
        session.skip("needs torch, a GPU and compute-sanitizer")
    build_cuda(session, "native")
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        if tool != "initcheck":  # which has to see what torch writes
            checker += ["--kernel-regex", "kns=qload"]
        session.run(*checker, sys.executable, "-m", "tests.gpu.small", *session.posargs, external=True)


@nox.session(default=False, venv_backend="none")
def bench_gpu(session: nox.Session) -> None:
    """Times of CUDA operators beside a copy, limits, fp16 and peers, and of a model; or of linears alone."""
    if not has_gpu(session):
        session.skip("this environment has no torch, or this machine no GPU")
    build_cuda(session, "native")
    if not session.posargs:
        session.run(sys.executable, "-m", "tests.bench.moves")
        session.run(sys.executable, "-m", "tests.bench.model")
    session.run(sys.executable, "-m", "tests.bench.linear", *session.posargs)
