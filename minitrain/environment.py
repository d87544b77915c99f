"""What must be installed and set before a device is made, and what must not: refused in words."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

# These make torch-xla compute float32 tensors in 16 bits, while they still say float32.
NARROWING = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16")


def has_neuron() -> bool:
    """Whether the native TorchNeuron is here; torch loads it by itself."""
    return hasattr(torch, "neuron") and torch.neuron.is_available()


def precompiling() -> bool:
    """Whether neuron_parallel_compile runs this: programs are compiled, all numbers are void."""
    return bool(os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"))


def check_environment(kind: str, kinds: tuple[str, ...], dtype: str = "") -> None:
    """Refuse an absent device, or an environment that would change its numbers; ValueError.

    dtype     the run's --dtype: fp64 needs a device that computes in float64
    """
    if kind not in kinds:
        raise ValueError(f"device must be one of auto, {', '.join(kinds)}, not {kind!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda needs a CUDA GPU and a CUDA build of torch; torch {torch.__version__} "
            "finds none. Pass --device cpu, or install a CUDA build."
        )
    if kind == "neuron" and not has_neuron():
        raise ValueError(
            "--device neuron needs a Trainium 2 or later and torch-neuronx 2.13 or later; torch "
            f"{torch.__version__} finds none. With torch-neuronx 2.9 pass --device xla."
        )
    if kind == "xla" and not find_spec("torch_xla"):
        raise ValueError(
            f"--device xla needs torch-xla, which is not beside torch {torch.__version__}. "
            "Install torch 2.9 with torch-xla 2.9 (minitrain[xla]), or pass --device cpu."
        )
    xla_on_cpu = kind == "xla" and os.environ.get("PJRT_DEVICE") == "CPU"
    if dtype == "fp64" and kind in ("xla", "neuron") and not xla_on_cpu:
        raise ValueError(
            f"--dtype fp64 needs a device that computes in float64, which {kind} does not. Pass "
            "--dtype fp32, or --device cpu."
        )
    narrowing = [name for name in NARROWING if os.environ.get(name, "0") != "0"]
    if kind == "xla" and narrowing:
        raise ValueError(
            f"precision must come from --dtype alone, but {' and '.join(narrowing)} is set: it "
            "makes float32 tensors 16 bits wide while they still say float32. Unset it and pass "
            "--dtype bf16, which keeps float32 where it matters."
        )


def check_compiler(kind: str) -> None:
    """Refuse --compile without the compiler that torch calls for cpu and cuda; ValueError."""
    on_cuda = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
    name, usual = ("CC", "gcc") if on_cuda else ("CXX", "g++")
    compiler = os.environ.get(name, usual)
    if kind in ("auto", "cpu", "cuda") and not has_neuron() and not shutil.which(compiler):
        raise ValueError(
            f"--compile needs a {'C' if on_cuda else 'C++'} compiler, but there is no {compiler}. "
            f"Install one, set {name} to its path, or leave out --compile."
        )


def notes(device) -> list[str]:
    """What a user should know about this device before a run, in sentences."""
    words = []
    if device.nxd is not None:
        words.append(
            "attention: neuronx-distributed's NKI kernel for rows of a multiple of 2,048 tokens "
            "with --no-pack, torch's otherwise; the ranks are laid out as it does"
        )
    if precompiling():
        words.append("neuron_parallel_compile: programs are compiled, and every number is void")
    return words


# Variables that have cost people days: name -> what to know about it.
TRAPS = {
    "XLA_USE_32BIT_LONG": "token ids become 32 bits wide",
    "NEURON_RT_VISIBLE_CORES": "each process sets its own under torchrun; a range here is refused",
    "NEURON_CC_FLAGS": "--auto-cast=none must be in it, else float32 is narrowed",
    "TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION": "0 lets programs that do not compile run slowly",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1 rounds bf16 at random; the float32 masters need 0",
    "CUDA_LAUNCH_BLOCKING": "1 makes every step slow",
}


def traps(kind: str) -> list[str]:
    """Variables of the environment that matter, as they are set, and what is missing."""
    found = [f"{k}={os.environ[k]}: {why}" for k, why in TRAPS.items() if k in os.environ]
    if kind == "neuron" and "TORCH_NEURONX_ENABLE_HOST_CC" not in os.environ:
        found.append("if collectives hang in a container: TORCH_NEURONX_ENABLE_HOST_CC=1")
    return found


def check_xla_world(seen: int, started: int, hardware: str) -> None:
    """Refuse a world that XLA's runtime does not see, whose collectives do nothing; ValueError.

    seen, started   processes, as XLA's runtime and as the launcher count them
    """
    if seen != started:
        raise ValueError(
            f"XLA's runtime must see all processes, but sees {seen} of the {started} that were "
            f"started, on {hardware}: each would train alone. On Trainium start one process per "
            "core with torchrun; CPU devices (PJRT_DEVICE=CPU) cannot be joined by torchrun."
        )
