import json
import struct
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers

from jaxllm.tokenizer import BYTES, END_OF_TEXT, from_file, from_llmc, from_tiktoken, gpt2


@pytest.mark.parametrize("text", ["", "plain", "naïve 日本 🙂\n\x00"])
def test_round_trip(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.uint16
    assert ids.shape == (len(text.encode()),)
    assert np.array_equal(ids, BYTES.encode(text.encode()))
    assert BYTES.decode(ids) == text
    assert BYTES.decode(ids.tolist()) == text


def test_every_byte_is_its_own_id():
    assert BYTES.encode(bytes(range(256))).tolist() == list(range(256))


def test_end_of_text_and_broken_ids_decode():
    assert BYTES.end_of_text == BYTES.vocab_size - 1 == 256
    assert BYTES.decode([ord("a"), BYTES.end_of_text, ord("b")]) == f"a{END_OF_TEXT}b"
    # Half of a character, and an id beyond the vocabulary.
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


def test_round_trip_of_a_vocabulary(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
        assert np.array_equal(ids, tokenizer.encode(text.encode()))
        assert tokenizer.end_of_text not in ids
    assert len(tokenizer.encode("the")) < 3


def test_special_and_broken_ids_of_a_vocabulary_decode(tokenizer):
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    assert tokenizer.decode([a, tokenizer.end_of_text, b]) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([a, tokenizer.vocab_size, b, -1, -1]) == "a\ufffdb\ufffd\ufffd"
    assert tokenizer.decode([2**40, a]) == "\ufffda"


def test_a_file_gives_the_ids_of_its_package(tmp_path):
    inner = train(tmp_path / "own name.json")
    ours = from_file(tmp_path / "own name.json")
    assert ours.vocab_size == inner.get_vocab_size()
    assert ours.end_of_text == inner.token_to_id(END_OF_TEXT)
    assert ours.begin_of_text is None
    for text in ("hello there", "the world"):
        assert ours.encode(text).tolist() == inner.encode(text).ids


def test_a_file_s_own_additions_are_left_out(tmp_path):
    """What it says of truncation, padding and tokens to put around a text."""
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


def test_ids_beyond_16_bits(tmp_path):
    train(tmp_path / "tokenizer.json")
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["model"]["vocab"]["far"] = 2**16
    path.write_text(json.dumps(contents))
    tokenizer = from_file(path)
    assert tokenizer.vocab_size == 2**16 + 1
    assert tokenizer.encode("a").dtype == np.uint32
    assert tokenizer.decode([2**16, 2**16 - 1]) == "far\ufffd"


def test_the_end_of_text_may_be_named(tmp_path):
    train(tmp_path / "tokenizer.json", ("<stop>",))
    assert from_file(tmp_path, end_of_text="<stop>").end_of_text == 0
    with pytest.raises(ValueError, match=r"has no <\|endoftext\|> or <\|end_of_text\|> or </s>"):
        from_file(tmp_path)
    with pytest.raises(ValueError, match="end_of_text is '<halt>', and the vocabulary has no <ha"):
        from_file(tmp_path, end_of_text="<halt>")


def test_files_that_hold_no_tokenizer_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: there is no such file"):
        from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: no tokenizer: "):
        from_file(tmp_path)


def test_gpt2_is_tiktoken_s(monkeypatch):
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
def test_a_package_that_is_missing_is_named(package, make, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{package}: pip install "jaxllm\[convert\]"'):
        make()


def llmc_bytes(tokens, end):
    header = struct.pack("<256i", 20240328, 2, len(tokens), end, *[0] * 252)
    return header + b"".join(bytes([len(token)]) + token for token in tokens)


# Bytes in an order of their own, three pairs, and the end-of-text in between.
LLMC_TOKENS = [bytes([255 - i]) for i in range(256)] + [
    b"th",
    END_OF_TEXT.encode(),
    b" th",
    b" the",
]


def test_a_tokenizer_of_llmc(tmp_path):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(llmc_bytes(LLMC_TOKENS, 257))
    tokenizer = from_llmc(path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (260, 257)
    # A space joins the word after it, and the pair of the lowest id merges first.
    assert tokenizer.encode("the the").tolist() == [256, 255 - ord("e"), 259]
    for text in ("", "that's 42 €!\n\n  thé" + END_OF_TEXT):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert 257 not in tokenizer.encode(text)
    assert tokenizer.decode([257]) == END_OF_TEXT


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (llmc_bytes(LLMC_TOKENS, 257)[:-1], "announces 260 tokens, and number 259"),
        (llmc_bytes(LLMC_TOKENS, 257) + b"x", "its 260 tokens end at byte"),
        (llmc_bytes(LLMC_TOKENS, 260), "end-of-text is 260; there are 260 tokens"),
        (llmc_bytes(LLMC_TOKENS[1:], 256), r"no token for b'\\xff'; each byte"),
        (struct.pack("<256i", 20240520, 2, *[0] * 254), "20240520; a tokenizer has 20240328"),
        (struct.pack("<256i", 20240328, 1, *[0] * 254), "version 1; .* has version 2"),
    ],
)
def test_wrong_tokenizers_of_llmc_are_refused(tmp_path, raw, message):
    path = tmp_path / "tokenizer.bin"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        from_llmc(path)
