"""Images of a run: read by preparation, kept beside the samples, and turned into what the target reads."""

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import fsspec
import torch
import transformers
from PIL import Image as Pictures
from PIL import ImageOps
from torch import Tensor

from infra.refusal import Refusal
from models.data.chat_template import UnrenderableError
from models.data.media import Image, Prompt
from models.data.sources import FAULTS
from models.data.thinking import Span

EMBEDDED = "embedded"
"""Value of `data.images` for images inside the records alone."""
FOLDER = "images"
"""Folder of a sample set that holds its images, named by their hashes."""
RECENT = 64
"""Images whose tokens are remembered: a conversation may be rendered several times."""
_BROKEN = (OSError, SyntaxError, ValueError, Pictures.DecompressionBombError)
"""Raised by Pillow for what is no image."""


class ImageProcessor:
    """A target's own: the tokens that stand for an image, and the values that its model reads.

    Raises Refusal for a target whose processor cannot be opened here.
    """

    def __init__(self, target: Path):
        try:
            self._processor: Any = _without_video(target)
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise Refusal(
                f"data.images: the target's image processor cannot be opened ({str(error).strip():.200}): leave "
                "data.images out, or complete the files of the target"
            ) from error
        self.mark: str = getattr(self._processor, "image_token", None) or ""
        """Stands for an image in the text of the chat template."""
        if not self.mark or not hasattr(self._processor, "image_processor"):
            raise Refusal(
                "data.images: the target reads no images by transformers' own processor (its folder has no "
                "preprocessor_config.json, or the family's class is unknown): leave data.images out"
            )

    @property
    def repeats_mark(self) -> bool:
        """Whether an image's tokens are the mark's, again and again, and no other."""
        return self._processor.image_token_ids == [self._processor.tokenizer.convert_tokens_to_ids(self.mark)]

    def tokens(self, image: Pictures.Image) -> str:
        """The text of the tokens that stand for an image."""
        return self._processor._process_images([image], return_tensors="pt")[1][0]

    def inputs(self, tokens: Tensor, images: Sequence[Path], like: Tensor | None = None) -> dict[str, Tensor]:
        """What the target's model reads beside `tokens` `[T]`, in a batch of one: pixels, and which tokens stand for
        them. On the device of `like`, floats in its data type."""
        if not images:
            return {}
        pictures = [opened(path.read_bytes()) for path in images]
        values = self._processor._process_images(pictures, return_tensors="pt")[0]
        kinds = self._processor.create_mm_token_type_ids([tokens.tolist()])
        # Not all families read them.
        names = [name for name in self._processor.model_input_names if name.endswith("token_type_ids")][:1]
        unused = self._processor.unused_input_names
        found = {key: value for key, value in values.items() if key not in unused}
        found |= {name: torch.tensor(kinds) for name in names}
        if like is None:
            return found
        return {key: value.to(like if value.is_floating_point() else like.device) for key, value in found.items()}


class _NoVideo:
    """In place of transformers' video processors, which want torchvision in 5.23.0."""

    @staticmethod
    def from_pretrained(*_: Any, **__: Any) -> None:
        """There is none."""


def _without_video(target: Path) -> Any:
    """The target's processor of text and images."""
    # Imported with the first target that reads images: they bring all modelling code along (3 s).
    processing = transformers.processing_utils
    kinds = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
        "video_processor": _NoVideo,
    }
    with (
        mock.patch.object(processing, "MODALITY_TO_AUTOPROCESSOR_MAPPING", kinds),
        mock.patch.object(processing.ProcessorMixin, "check_argument_for_proper_class"),
    ):
        return transformers.AutoProcessor.from_pretrained(target, trust_remote_code=False)


class ImageShelf:
    """Reads the images of conversations, inside the records or below `root`, and keeps them in `folder`."""

    def __init__(self, root: str, folder: Path, processor: ImageProcessor):
        self.folder, self._processor, self._files = folder, processor, None
        self._keep = lru_cache(RECENT)(self._kept)
        if root == EMBEDDED:
            return
        try:
            self._files, self._root = fsspec.core.url_to_fs(str(Path(root).absolute()) if "://" not in root else root)
        except FAULTS as error:
            raise Refusal(f"data.images {root!r} cannot be read ({error}): check the address") from error

    def expand(
        self, text: str, spans: Sequence[Span], images: Sequence[Image]
    ) -> tuple[str, tuple[Span, ...], tuple[str, ...]]:
        """A rendered conversation with the tokens of its images, where spans of it lie then, and the images' names.

        Raises UnrenderableError: an image cannot be read, or the template does not show each once.
        """
        mark = self._processor.mark
        starts = [place for place in range(len(text)) if text.startswith(mark, place)]
        if len(starts) != len(images):
            raise UnrenderableError(
                f"the chat template shows {len(starts)} of {len(images)} images: leave the conversation out, or use "
                "the template that the target is served with"
            )
        if any(start < end and place + len(mark) > start for place in starts for start, end in spans if place < end):
            raise UnrenderableError(f"an answer holds {mark}, which stands for an image: leave the conversation out")
        kept = [self._keep(image) for image in images]
        pieces, moved, done = list[str](), list(spans), 0
        for place, (_, tokens) in zip(starts, kept, strict=True):
            pieces += [text[done:place], tokens]
            done, longer = place + len(mark), len(tokens) - len(mark)
            moved = [
                (a + longer, b + longer) if start > place else (a, b)
                for (a, b), (start, _) in zip(moved, spans, strict=True)
            ]
        return "".join([*pieces, text[done:]]), tuple(moved), tuple(name for name, _ in kept)

    def keep(self, image: Image) -> str:
        """Name of the image's file in the folder. Raises UnrenderableError where it cannot be read."""
        return self._keep(image)[0]

    def _kept(self, image: Image) -> tuple[str, str]:
        """Name of the image's file, and its tokens."""
        content = self._read(image)
        name, tokens = hashlib.sha256(content).hexdigest(), self._processor.tokens(opened(content))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)
        return name, tokens

    def _read(self, image: Image) -> bytes:
        if isinstance(image, bytes):
            return image
        if image.startswith("data:"):
            try:
                return base64.b64decode(image.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise UnrenderableError(f"an image is no base64 ({error}): correct it, or leave it out") from error
        if self._files is None:
            raise UnrenderableError(
                f"the image {image:.80} is a path: set data.images to the folder that it is relative to"
            )
        if "://" in image:
            raise UnrenderableError(
                f"the image {image:.80} is somewhere else: download the images, and give their paths below data.images"
            )
        path = PurePosixPath(image)
        if path.is_absolute() or ".." in path.parts:
            raise UnrenderableError(f"the image {image:.80} is no path below data.images: write it so")
        try:
            return self._files.cat_file(f"{self._root}/{image}")
        except FAULTS as error:
            raise UnrenderableError(f"the image {image:.80} cannot be read below data.images ({error})") from error


def asked_with(prompt: Prompt, media_ids: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
    """A prompt as SGLang wants it: one placeholder for each image, which its own processor expands, and the files,
    which the server reads from this machine's disk."""
    if not prompt.images:
        return list(prompt.tokens), {}
    repeated = zip(prompt.tokens, (None, *prompt.tokens), strict=False)
    asked = [token for token, before in repeated if token != before or token not in media_ids]
    return asked, {"image_data": [path.as_uri() for path in prompt.images]}


def opened(content: bytes) -> Pictures.Image:
    """The picture in a file's bytes, turned as cameras note it, which engines do too.

    Raises UnrenderableError for what is none.
    """
    try:
        return ImageOps.exif_transpose(Pictures.open(BytesIO(content))).convert("RGB")
    except _BROKEN as error:
        raise UnrenderableError(f"an image cannot be opened ({error}): replace it, or leave it out") from error


def images_hash(root: str | None) -> str:
    """Changes when an image below `root` does, by names, sizes and times. Raises Refusal for a missing folder."""
    if root in (None, EMBEDDED):
        return root or ""
    try:
        files, place = fsspec.core.url_to_fs(str(Path(root).absolute()) if "://" not in root else root)
        files.invalidate_cache()
        if not files.exists(place):
            raise Refusal(f"data.images {root!r}: there is no such folder: check the path")
        listed: dict[str, dict[str, Any]] = files.find(place, detail=True)
    except FAULTS as error:
        raise Refusal(f"data.images {root!r} cannot be read ({error}): check the address and credentials") from error
    known = ("size", "mtime", "ETag", "LastModified")
    parts = [(path, [str(info.get(key)) for key in known]) for path, info in sorted(listed.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
