import json
import pickle
import random
import re
import struct
import sys
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers

import jaxllm.data.tokenizer
from jaxllm.data.tokenizer import (
    BYTES,
    END_OF_TEXT,
    GPT2_PATTERN,
    from_file,
    from_llmc,
    from_tiktoken,
    gpt2,
    load,
)


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本 🙂\n\x00"])
def test_bytes_round_trip(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.shape == (len(text.encode()),)
    assert np.array_equal(ids, BYTES.encode(text.encode()))
    assert BYTES.decode(ids) == text
    assert BYTES.decode(ids.tolist()) == text


def test_every_byte_is_its_own_id():
    assert BYTES.encode(bytes(range(256))).tolist() == list(range(256))


def test_bytes_decode_end_of_text_and_invalid_ids():
    assert BYTES.end_of_text == BYTES.vocab_size - 1 == 256
    assert BYTES.decode([ord("a"), BYTES.end_of_text, ord("b")]) == f"a{END_OF_TEXT}b"
    # An incomplete UTF-8 sequence, and an id outside of the vocabulary.
    assert BYTES.decode([0xC3, ord("x"), 300]) == "\ufffdx\ufffd"


TEXTS = ["", "hello there", "naïve 日本 🙂\n\x00", f"a{END_OF_TEXT}b", " <s> two  spaces\t"]


def train(path, special=(END_OF_TEXT,), options=()):
    """Writes a small byte-level tokenizer.json, and returns the tokenizer it was saved from."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["hello there, hello world: the naïve 日本"] * 9, trainer)
    for option in options:
        option(inner)
    inner.save(str(path))
    return inner


def toy_encoding():
    return tiktoken.Encoding(
        "toy",
        pat_str=r"\w+|\W+",
        mergeable_ranks={bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257},
        special_tokens={END_OF_TEXT: 300},
    )


@pytest.fixture(params=["file", "tiktoken"])
def tokenizer(request, tmp_path):
    if request.param == "tiktoken":
        return from_tiktoken(toy_encoding())
    train(tmp_path / "tokenizer.json")
    return from_file(tmp_path)


def test_vocabulary_round_trip(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
        assert np.array_equal(ids, tokenizer.encode(text.encode()))
        assert tokenizer.end_of_text not in ids
    assert len(tokenizer.encode("the")) < 3


def test_encoders_reject_what_is_no_text(tokenizer):
    wrong: Any = (np.array([104, 105]), "ndarray"), (None, "NoneType")
    for encode in (BYTES.encode, tokenizer.encode):
        for text, kind in wrong:
            with pytest.raises(TypeError, match=f"text has type {kind}; it must be a string or"):
                encode(text)


def test_vocabulary_decodes_special_and_invalid_ids(tokenizer):
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.decode([a, tokenizer.end_of_text, b]) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([a, tokenizer.vocab_size, b, -1, -1]) == "a\ufffdb\ufffd\ufffd"
    assert tokenizer.decode([2**40, a]) == "\ufffda"


def test_from_file_matches_the_tokenizers_package(tmp_path):
    inner = train(tmp_path / "own name.json")
    ours = from_file(tmp_path / "own name.json")
    assert ours.vocab_size == inner.get_vocab_size()
    assert ours.end_of_text == inner.token_to_id(END_OF_TEXT)
    assert ours.begin_of_text is None
    for text in ("hello there", "the world"):
        assert ours.encode(text).tolist() == inner.encode(text).ids


def test_truncation_padding_and_post_processing_are_ignored(tmp_path):
    """A tokenizer.json may ask for truncation, padding and tokens around a text."""
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    around = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, 0)]
    )
    inner = train(
        tmp_path / "tokenizer.json",
        (begin, end),
        [
            lambda t: setattr(t, "post_processor", around),
            lambda t: t.enable_truncation(3),
            lambda t: t.enable_padding(length=9),
        ],
    )
    assert len(inner.encode("hi").ids) == 9
    ours = from_file(tmp_path)
    assert (ours.begin_of_text, ours.end_of_text) == (0, 1)
    assert ours.decode(ours.encode("hello world")) == "hello world"


def test_ids_beyond_16_bits_are_uint32(tmp_path):
    train(tmp_path / "tokenizer.json")
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["vocab"]["far"] = 2**16
    path.write_text(json.dumps(contents))
    tokenizer = from_file(path)
    assert tokenizer.vocab_size == 2**16 + 1
    assert tokenizer.encode("a").dtype == np.uint32
    assert tokenizer.decode([2**16, 2**16 - 1]) == "far\ufffd"


NAMES = ("<eos>", "</s>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<|end_of_text|>")  # noqa: RUF001


@pytest.mark.parametrize("name", NAMES)
def test_common_end_of_text_names_are_detected(tmp_path, name):
    train(tmp_path / "tokenizer.json", ("<unk>", name))
    tokenizer = from_file(tmp_path)
    assert tokenizer.end_of_text == 1
    assert tokenizer.stop_tokens == (1,)


@pytest.mark.parametrize(
    ("file", "contents"),
    [
        ("tokenizer_config.json", {"eos_token": "<halt>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<halt>", "lstrip": False}}),
        ("special_tokens_map.json", {"eos_token": {"content": "<halt>"}}),
        ("generation_config.json", {"eos_token_id": [2, 0]}),
        ("config.json", {"eos_token_id": 2}),
    ],
)
def test_config_files_name_the_end_of_text(tmp_path, file, contents):
    """They win over common names: Gemma's vocabulary has `</s>` as an HTML tag."""
    train(tmp_path / "tokenizer.json", ("</s>", "<stop>", "<halt>"))
    (tmp_path / file).write_text(json.dumps(contents))
    assert (
        load(str(tmp_path)).end_of_text == load(str(tmp_path / "tokenizer.json")).end_of_text == 2
    )
    assert from_file(tmp_path, end_of_text="<stop>").stop_tokens == (1,)


def test_chat_model_stops_at_end_of_turn_and_end_of_text(tmp_path):
    train(tmp_path / "tokenizer.json", (END_OF_TEXT, "<|end_of_text|>", "<|im_end|>"))
    assert from_file(tmp_path).stop_tokens == (0,)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "<|im_end|>"}))
    tokenizer = from_file(tmp_path)
    assert (tokenizer.end_of_text, tokenizer.stop_tokens) == (0, (0, 2))
    config.write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    assert from_file(tmp_path).stop_tokens == (1,)


def test_all_eos_token_ids_are_stop_tokens(tmp_path):
    """Llama 3.1, Gemma and Qwen list the end of a turn only in eos_token_id."""
    train(tmp_path / "tokenizer.json", ("<bos>", "<eos>", "<turn>", "<call>"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [3, 1, true, -1, 100000, null]}')
    assert from_file(tmp_path).stop_tokens == (1, 3, 2)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert from_file(tmp_path).stop_tokens == (2, 3, 1)
    assert from_file(tmp_path, end_of_text="<call>").stop_tokens == (3,)


@pytest.mark.parametrize(
    ("config", "begin"),
    [
        ({}, 0),
        ({"add_bos_token": False, "bos_token": "<s>"}, None),
        ({"add_bos_token": True, "bos_token": "<begin>"}, 2),
        ({"bos_token": "</s>"}, 0),  # GPT-2 names a bos_token but does not use it
    ],
)
def test_add_bos_token_selects_the_begin_of_text(tmp_path, config, begin):
    train(tmp_path / "tokenizer.json", ("<s>", "</s>", "<begin>"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert from_file(tmp_path).begin_of_text == begin


@pytest.mark.parametrize(
    "contents", ["{", "[]", "[" * 10_000, '{"eos_token": 5}', '{"eos_token_id": -1}']
)
def test_invalid_config_files_are_rejected(tmp_path, contents):
    train(tmp_path / "tokenizer.json", ("</s>",))
    path = tmp_path / "tokenizer_config.json"
    path.write_text(contents)
    if contents.endswith("}"):  # a JSON object without a valid token
        assert from_file(tmp_path).end_of_text == 0
    else:
        with pytest.raises(ValueError, match=f"^{path}: (invalid JSON|not a JSON object)"):
            from_file(tmp_path)


def test_ordinary_tokens_are_not_detected_as_special(tmp_path):
    inner = train(tmp_path / "tokenizer.json", ("<unk>",))
    inner.add_tokens(["</s>", "<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="end_of_text is None"):
        from_file(tmp_path)
    tokenizer = from_file(tmp_path, end_of_text="</s>")
    assert tokenizer.end_of_text == inner.token_to_id("</s>")
    assert tokenizer.begin_of_text is None


def test_end_of_text_option_names_the_token(tmp_path):
    train(tmp_path / "tokenizer.json", ("<stop>",))
    assert from_file(tmp_path, end_of_text="<stop>").end_of_text == 0
    with pytest.raises(
        ValueError, match=r"has no <\|endoftext\|> .*</s>.*; pass .* \(--end-of-text\)"
    ):
        from_file(tmp_path)
    assert load("bytes", end_of_text=END_OF_TEXT) is BYTES
    with pytest.raises(ValueError, match="end_of_text is '</s>'; that of bytes is"):
        load("bytes", end_of_text="</s>")
    with pytest.raises(ValueError, match="end_of_text is '<halt>', and the vocabulary has no <ha"):
        from_file(tmp_path, end_of_text="<halt>")
    wrong: Any = 0
    with pytest.raises(TypeError, match="end_of_text is 0; it must be the name of a token"):
        from_file(tmp_path, end_of_text=wrong)


def test_invalid_tokenizer_files_are_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: there is no such file"):
        from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer: "):
        from_file(tmp_path)


def test_gpt2_uses_tiktoken(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": toy_encoding()}.__getitem__)
    tokenizer = gpt2()
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.end_of_text) == ("toy", 301, 300)
    assert tokenizer.encode("the").tolist() == [257]


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tokenizers", lambda: from_file("x")),
        ("tiktoken", gpt2),
        ("tiktoken", lambda: from_llmc("x")),
    ],
)
def test_import_error_names_the_missing_package(package, make, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{package}: pip install "jaxllm\[convert\]"'):
        make()


def llmc_bytes(tokens, end):
    header = struct.pack("<256i", 20240328, 2, len(tokens), end, *[0] * 252)
    return header + b"".join(bytes([len(token)]) + token for token in tokens)


# The bytes in reverse order, three merged pairs, and the end-of-text token between them.
LLMC_TOKENS = [bytes([255 - i]) for i in range(256)] + [
    b"th",
    END_OF_TEXT.encode(),
    b" th",
    b" the",
]


def test_llmc_tokenizer_encodes_and_decodes(tmp_path):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(llmc_bytes(LLMC_TOKENS, 257))
    tokenizer = from_llmc(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (260, 257)
    # A space belongs to the next word, and the pair with the lowest id merges first.
    assert tokenizer.encode("the the").tolist() == [256, 255 - ord("e"), 259]
    for text in ("", "that's 42 €!\n\n  thé" + END_OF_TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert 257 not in tokenizer.encode(text)
    assert tokenizer.decode([257]) == END_OF_TEXT


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (llmc_bytes(LLMC_TOKENS, 257)[:-1], "has 260 tokens, and number 259"),
        (llmc_bytes(LLMC_TOKENS, 257) + b"x", "its 260 tokens end at byte"),
        (llmc_bytes(LLMC_TOKENS, 260), "end-of-text is 260; there are 260 tokens"),
        (llmc_bytes(LLMC_TOKENS[1:], 256), r"no token for b'\\xff'; each byte"),
        (struct.pack("<256i", 20240520, 2, *[0] * 254), "20240520; a tokenizer has 20240328"),
        (struct.pack("<256i", 20240328, 1, *[0] * 254), "version 1; .* has version 2"),
    ],
)
def test_invalid_llmc_tokenizers_are_rejected(tmp_path, raw, message):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        from_llmc(path)


def all_tokenizers(folder):
    train(folder / "tokenizer.json", options=[lambda t: t.enable_truncation(3)])
    (folder / "tokenizer.bin").write_bytes(llmc_bytes(LLMC_TOKENS, 257))
    return (
        BYTES,
        from_file(folder),
        from_llmc(folder / "tokenizer.bin"),
        from_tiktoken(toy_encoding()),
    )


def test_tokenizers_can_be_pickled(tmp_path):
    for tokenizer in all_tokenizers(tmp_path):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.name == tokenizer.name
        assert copy.stop_tokens == tokenizer.stop_tokens
        for text in TEXTS:
            assert np.array_equal(copy.encode(text), tokenizer.encode(text))
        assert copy.decode([*range(270), 999]) == tokenizer.decode([*range(270), 999])


def gpt2_encoding():
    """An encoding with GPT-2's pattern, and merges of letters and spaces."""
    spaces = [b" " * 2**i for i in range(1, 8)]
    pairs = [b"th", b"the", b" th", b" the", b"\n\n", b"\n ", *spaces]
    ranks = {token: i for i, token in enumerate([bytes([i]) for i in range(256)] + pairs)}
    special = {END_OF_TEXT: len(ranks)}
    return tiktoken.Encoding(
        "toy", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


def test_long_white_space_is_split_as_by_the_pattern(monkeypatch):
    encoding = gpt2_encoding()
    tokenizer = jaxllm.data.tokenizer._from_tiktoken(encoding, gpt2_pattern=True)
    pattern = jaxllm.data.tokenizer._LONG_RUN.pattern
    length = str(jaxllm.data.tokenizer._LONG)
    assert length in pattern
    monkeypatch.setattr(jaxllm.data.tokenizer, "_LONG", 3)
    monkeypatch.setattr(
        jaxllm.data.tokenizer, "_LONG_RUN", re.compile(pattern.replace(length, "3"))
    )
    random.seed(0)
    letters = [" "] * 9 + list("the.\n\t\u3000\xa0\x1c\u200b1'")
    for _ in range(3000):
        text = "".join(random.choices(letters, k=random.randrange(1, 24)))
        assert tokenizer.encode(text).tolist() == encoding.encode_ordinary(text), repr(text)


def test_a_million_spaces_are_encoded(tmp_path):
    text = "the" + " " * 1_100_000 + "the"
    tokenizer = jaxllm.data.tokenizer._from_tiktoken(gpt2_encoding(), gpt2_pattern=True)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == 1 + 1_099_999 // 128 + bin(1_099_999 % 128).count("1") + 1
    # With another pattern, tiktoken panics, and the panic becomes a ValueError.
    with pytest.raises(ValueError, match=r"the tokenizer package panicked: .*StackOverflow"):
        from_tiktoken(gpt2_encoding()).encode(text)
