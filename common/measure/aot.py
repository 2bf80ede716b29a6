"""Compile a stage's kernels without a GPU, and report their registers, spills, shared memory and instructions.

    python -m common.measure.aot --stage v3 --arch 80,90 --head-dim 64,128 --causal yes,no
    python -m common.measure.aot --stage v5 --json before.json

The second command writes a file. After an edit, the option `--against before.json` says whether the compiled code has changed.

This program calls the stage's `forward` and `backward` on tensors that have no data. `StandInDriver` replaces Triton's driver
and describes the chosen GPU. So Triton compiles every kernel for that GPU, but runs none.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import inspect
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import sys
from types import SimpleNamespace

import torch
import triton
from tabulate import tabulate
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import AutotunerError

import stages
from common.checks import SMALLEST_PAGE
from common.entry import Descales, Lengths, Starts
from common.measure.options import EIGHT_BITS, PACKED, PAGES, add_list, command, json_path, list_of, one_of, single, write_json
from common.measure.progress import Progress

# Maximum bytes of shared memory per CTA, by architecture (90 is sm_90).
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
USUAL_ARCHS = (80, 90, 100)  # they have different instructions to copy and multiply tiles
INSTRUCTIONS = {  # name in the table -> name in PTX
    "mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "cp.async": "cp.async.cg",
    "TMA": "cp.async.bulk.tensor",
}  # fmt: skip
CASE = "stage", "arch", "dtype", "head_dim", "value_dim", "causal", "kv_heads", "lengths"
COMPARED = "registers", "spilled_bytes", "shared_bytes", "code"
BATCH, HEADS, SEQ_LEN = 4, 16, 4096  # ordinary sizes, with which every kernel is compiled
FEW_QUERIES = 4  # of each sequence, when a cache is decoded


class StandInDriver:
    """A driver for Triton that describes a GPU, but loads no binary and launches nothing.

    Args:
        arch: the GPU's architecture, such as 80 for sm_80.
        launched: a function that gets the metadata of each compiled kernel before the kernel's first launch.
        benchmarker: a function that times an autotuner's configurations, `(kernel_call, quantiles, warmup, rep) -> times`.
    """

    def __init__(self, arch, launched, benchmarker):
        self.get_current_target = lambda: GPUTarget("cuda", arch, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        self.get_benchmarker = lambda: benchmarker
        self._launched = launched
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_LIMIT[arch], "multiprocessor_count": 132},
            load_binary=lambda name, binary, shared, device: (name, name, 0, 0, 1024),  # at most 1024 threads per CTA
        )

    def launcher_cls(self, source, metadata):
        self._launched(metadata)
        return lambda *args: None


def first_that_survives(autotuner, kwargs):
    """Return a list of one configuration: the first that `early_config_prune` keeps.

    If this function replaces `Autotuner.prune_configs`, Triton compiles a single configuration of each kernel.
    """
    for config in autotuner.configs:
        if kept := autotuner.early_config_prune([config], autotuner.nargs, **kwargs):
            return kept
    raise AutotunerError(f"all {len(autotuner.configs)} configurations of {autotuner.base_fn.__name__} were pruned")


def _describe(source, metadata, metadata_group, ptxas_log):
    """Describe a compiled kernel: return the entries of its row, without the case's."""
    texts = {path.suffix: path.read_text() for path in map(pathlib.Path, metadata_group.values()) if path.suffix != ".cubin"}
    source_ir = texts.get(".ttir") or texts[".ttgir"]  # Gluon has no .ttir
    constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
    config = {name: value for name, value in constants.items() if name.startswith("BLOCK_") or "STAGES" in name}
    config["num_warps"] = metadata["num_warps"]
    if ".ttir" in texts:  # a Gluon kernel has STAGES instead
        config["num_stages"] = metadata["num_stages"]
    return {
        "kernel": source.fn.__name__,
        "config": " ".join(f"{name}={value}" for name, value in config.items()),
        **resources(ptxas_log),
        "shared_bytes": metadata["shared"],
        "instructions": [name for name, ptx in INSTRUCTIONS.items() if ptx in texts[".ptx"]],
        "dots": sum(source_ir.count(name) for name in ("tt.dot ", "ttng.warp_group_dot ")),
        "descriptors": sum(str(type_name).startswith("tensordesc") for type_name in source.signature.values()),
        "ptx": collections.Counter(opcodes(texts[".ptx"])),
        "code": hashlib.sha256(code(texts[".ptx"]).encode()).hexdigest()[:12],
    }


def resources(ptxas_log: str) -> dict:
    """Return the registers of a thread, the bytes that it stores and loads because of spills, and the warnings of ptxas."""
    return {
        "registers": max(map(int, re.findall(r"Used (\d+) registers", ptxas_log))),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas_log))),
        "warnings": sorted(set(re.findall(r"\(C\d+\).*", ptxas_log))),
    }


def code(ptx: str) -> str:
    """Return a kernel's PTX without comments and without what only a debugger reads, which changes with the line numbers."""
    ptx = re.split(r"^\s*\.section\s+\.debug_", ptx, maxsplit=1, flags=re.MULTILINE)[0]  # these sections are the last
    ptx = re.sub(r"//.*|^\s*\.(?:loc|file)\b.*$|^\s*\$L__(?:tmp|func_)\w+:\s*$", "", ptx, flags=re.MULTILINE)
    return "\n".join(filter(None, map(str.strip, ptx.splitlines())))


def opcodes(ptx: str) -> list[str]:
    """Return the opcode of each PTX instruction with its modifiers, such as "add.s32"."""
    # An instruction begins a line or a statement, and may have a predicate. A label ends with a colon.
    return re.findall(r"(?:^|[;{}])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*\w)(?=[\s;])", code(ptx), re.MULTILINE)


def _compile_case(case: dict) -> list[dict]:
    """Compile the kernels of a case in this process, and return the case's records."""
    compiled, records, output = {}, [], io.StringIO()

    def on_compiled(src, metadata, metadata_group, times, cache_hit):
        compiled[metadata["hash"]] = _describe(src, metadata, metadata_group, output.getvalue())
        output.seek(output.truncate(0))

    def on_launched(metadata):
        records.append(case | compiled[metadata.hash])

    driver = StandInDriver(case["arch"], on_launched, lambda kernel_call, **options: [0.0, 0.0, 0.0])
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.listener = on_compiled
    triton.knobs.compilation.always_compile = True  # a cached kernel has no ptxas log
    triton.knobs.nvidia.dump_ptxas_log = True  # the compiler prints the log to stdout
    Autotuner.prune_configs = first_that_survives
    if reason := stages.unavailable(case["stage"]):
        return [case | {"reason": reason}]

    heads = HEADS, case["kv_heads"], case["kv_heads"], HEADS, HEADS
    head_dim, value_dim = case["head_dim"], case["value_dim"] or case["head_dim"]
    columns = head_dim, head_dim, value_dim, value_dim, value_dim
    shapes = [(BATCH, number, SEQ_LEN, size) for number, size in zip(heads, columns, strict=True)]
    q, k, v, out, grad_out = (torch.empty(shape, dtype=getattr(torch, case["dtype"]), device="meta") for shape in shapes)
    lse = torch.empty(BATCH, HEADS, SEQ_LEN, dtype=torch.float32, device="meta")
    options = {"causal": case["causal"], "scale": 0.125}
    stage = stages.load(case["stage"])
    calls = [(stage.forward, (q, k, v)), (stage.backward, (grad_out, q, k, v, out, lse))]
    if case["lengths"]:
        packed = case["lengths"] == PACKED
        argument = "starts" if packed else "lengths"
        calls = [call for call in calls if argument in inspect.signature(call[0]).parameters]
        if not calls:
            return [case | {"reason": f"takes no {argument}"}]
        numbers = torch.empty(BATCH + packed, dtype=torch.int32, device="meta")
        options |= {"starts": Starts(numbers, numbers)} if packed else {"lengths": Lengths(numbers)}
        if case["lengths"] == EIGHT_BITS:
            if "descales" not in inspect.signature(stage.forward).parameters:
                return [case | {"reason": "takes no 8 bits"}]
            k, v = (each.to(torch.float8_e4m3fn) for each in (k, v))
            descale = torch.empty(BATCH, case["kv_heads"], device="meta")
            options["descales"] = Descales(descale, descale)
        if case["lengths"] == PAGES:
            if not getattr(stage, "PAGES", False):
                return [case | {"reason": "takes no pages"}]
            table = torch.empty(BATCH, SEQ_LEN // SMALLEST_PAGE, dtype=torch.int32, device="meta")
            options["lengths"] = Lengths(numbers, table)
            k, v = (t.reshape(-1, t.shape[1], SMALLEST_PAGE, t.shape[3]) for t in (k, v))
        if packed:
            calls = [(function, [each[:1] for each in arguments]) for function, arguments in calls]
        else:  # long prompts, and decoding
            calls = [(stage.forward, (each, k, v)) for each in (q, q[:, :, :FEW_QUERIES])]
    for function, arguments in calls:
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                function(*arguments, **options)
        except NotImplementedError as error:
            records.append(case | {"reason": str(error)})
        except (TritonError, RuntimeError) as error:  # RuntimeError: a pass of the compiler failed
            records.append(case | {"error": f"{function.__name__}: {type(error).__name__}: {error}"})
    return records


def _in_own_process(context, case: dict) -> list[dict]:
    """Compile a case in a new process, which has cached no kernel. If the compiler crashes, only the new process ends."""
    with concurrent.futures.ProcessPoolExecutor(1, context) as process:
        try:
            return process.submit(_compile_case, case).result()
        except Exception as error:  # the process died, or the case failed; the other cases go on
            return [case | {"error": f"the compiler's process: {error!r}"}]


def compile_cases(cases: list[dict]) -> list[dict]:
    """Compile every kernel of the cases in parallel on all CPU cores, with a progress line.

    An autotuned kernel is compiled with the first configuration that the autotuner would try.

    Args:
        cases: dicts with stage, arch (int), dtype (name), head_dim (int), causal (bool), kv_heads (a divisor of `HEADS`),
            value_dim (None means head_dim) and lengths (whether each sequence has a length; `PACKED` if they are packed,
            `PAGES` if they lie in pages, and `EIGHT_BITS` if k and v have 8 bits).

    Returns:
        Records in the order of the cases. A record is its case's dict with more keys. A row, for a kernel, has those of
        `_describe`. Its number of matmuls, `dots`, is counted before most compiler passes. Any other record has the key
        `error`, or the key `reason`, which says why the stage does not support the GPU or the lengths.
    """
    os.environ["TRITON_INTERPRET"] = "0"  # the new processes compile kernels
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use no GPU memory
    context, records = multiprocessing.get_context("forkserver"), []
    context.set_forkserver_preload(["common.measure.aot"])  # all processes share one import of torch and triton
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool, Progress(len(cases)) as bar:
        for found in pool.map(functools.partial(_in_own_process, context), cases):  # after Ctrl-C no further case starts
            records += found
            bar.update(1)
    return records


def table(rows: list[dict]) -> str:
    """Format the rows as a table."""
    cells = [
        [stages.version(row["stage"]), *(row[name] for name in CASE[1:]), row["kernel"], row["registers"], row["spilled_bytes"],
         re.sub(r"[A-Za-z_]+=", "", row["config"]), " ".join(row["instructions"]),
         f"{row['shared_bytes']}/{SHARED_LIMIT[row['arch']]}"]
        for row in rows
    ]  # fmt: skip
    headers = ["stage", "arch", "dtype", "D", "Dv", "causal", "K/V heads", "lengths", "kernel", "regs", "spilled"]
    return tabulate(cells, [*headers, "config", "instructions", "shared"])


def _named(case: dict) -> str:
    return " ".join(f"{name}={case[name]}" for name in CASE)


def differences(before: list[dict], after: list[dict]) -> list[str]:
    """Compare two lists of rows. Return a line for each kernel whose code differs, or that only one list has.

    Kernels with the same case and name are compared in their order.
    """
    kernels, lines = collections.defaultdict(lambda: ([], [])), []
    for side, rows in enumerate((before, after)):
        for row in rows:
            kernels[f"{row['kernel']} {_named(row)}"][side].append(row)
    for name, both in kernels.items():
        for old, new in itertools.zip_longest(*both):
            if not old or not new:
                lines.append(f"{name}: only {'after' if new else 'before'}")
                continue
            changed = [f"{what} {old[what]} -> {new[what]}" for what in COMPARED if old[what] != new[what]]
            more = {
                opcode: new["ptx"].get(opcode, 0) - old["ptx"].get(opcode, 0) for opcode in sorted({*old["ptx"], *new["ptx"]})
            }
            changed += [f"{number:+} {opcode}" for opcode, number in more.items() if number]
            lines += [f"{name}: {', '.join(changed)}"] if changed else []
    return lines


def rows_of(text: str) -> list[dict]:
    """Return the rows of a file that `--json` wrote. Raise ValueError if it is no such file."""
    try:
        return json.loads(pathlib.Path(text).read_text())["rows"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{text!r} is no file that --json has written") from None


def main(argv: list[str]) -> int:
    """Run the command line, and return the exit status.

    The status is 1 if a kernel does not compile, needs too much shared memory, or differs from the file of `--against`. It
    is 2 if the stages have no kernel to compile.
    """
    parser = command("common.measure.aot", __doc__)
    usual, divisors = ",".join(map(str, USUAL_ARCHS)), [number for number in range(1, HEADS + 1) if HEADS % number == 0]
    add_list(parser, "--stage", ",".join(stages.names()))
    defaults = {"head-dim": "64,128", "value-dim": None, "dtype": "float16", "causal": "yes", "lengths": "no"}
    for name, default in defaults.items():
        add_list(parser, f"--{name}", default)
    for flag, choices, default in (("--arch", SHARED_LIMIT, usual), ("--kv-heads", divisors, str(HEADS))):
        help_text = f"any of {', '.join(map(str, choices))} (default: %(default)s)"
        parser.add_argument(flag, type=list_of(one_of([*choices])), default=default, metavar="LIST", help=help_text)
    parser.add_argument("--json", type=json_path, metavar="FILE", help="also write rows and errors to FILE")
    parser.add_argument(
        "--against", type=single(rows_of), metavar="FILE", help="compare the kernels with those of a file of --json"
    )
    options = parser.parse_args(argv)
    product = itertools.product(*(getattr(options, name) for name in CASE))
    records = compile_cases([dict(zip(CASE, values, strict=True)) for values in product])
    rows, errors = ([record for record in records if key in record] for key in ("kernel", "error"))
    for row in rows:
        if row["shared_bytes"] > (limit := SHARED_LIMIT[row["arch"]]):
            needs = f"{row['kernel']} {row['config']} needs {row['shared_bytes']} bytes of shared memory, but a CTA has {limit}"
            errors.append(row | {"error": needs})
    if rows and not options.against:
        print(table(rows))
    for line in dict.fromkeys(f"{record['stage']} {record['reason']}" for record in records if "reason" in record):
        print(line)
    for row in rows:
        for warning in row["warnings"]:
            print(f"warning: {row['kernel']} {_named(row)} {row['config']}: {warning}")
    for error in errors:
        print(f"error: {_named(error)}: {error['error']}", file=sys.stderr)
    if options.json:
        write_json(options.json, {"rows": rows, "errors": errors})
    if not rows and not errors:
        print("nothing was compiled", file=sys.stderr)
        return 2
    if options.against and not errors:
        lines = differences(options.against, rows)
        print(*lines, f"{len(rows)} kernels compared: {len(lines)} differ", sep="\n")
        return 1 if lines else 0
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
