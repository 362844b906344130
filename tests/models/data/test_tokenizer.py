import os
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from models.data.tokenizer import read_tokenizer


def save(folder: Path, *words: str) -> None:
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(folder)


def test_a_tokenizer_is_read_again_only_when_a_file_of_its_folder_changed(tmp_path: Path):
    save(tmp_path, "?", "one")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    first = read_tokenizer(tmp_path)
    assert read_tokenizer(str(tmp_path)) is first
    save(tmp_path, "?", "one", "two")
    for file in tmp_path.glob("*.json"):  # in case both were written within one tick of the clock
        os.utime(file, ns=(1, 1))
    assert len(read_tokenizer(tmp_path)) == 3
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert read_tokenizer(tmp_path).chat_template is not None
