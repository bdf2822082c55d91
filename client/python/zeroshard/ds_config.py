"""The part of a ds_config.json that the trainer itself needs: data types, optimizer, leaf modules.

The daemon resolves and checks the whole file and is the authority; the text is sent to it as
written. This reader accepts what DeepSpeed's accepts (Hjson): comments with #, // and /* */,
trailing commas, unquoted keys, single quotes, and unquoted strings that run to the end of their
line.
"""

import base64
import binascii
import json
import os
import re

import torch

from zeroshard.errors import invalid

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_SKIP = re.compile(r"(\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)+", re.S)
_KEY = re.compile(r"[^\s{}\[\],:\"']+")


class _Parser:
    def __init__(self, text):
        self.text = text
        self.at = 0

    def skip(self):
        match = _SKIP.match(self.text, self.at)
        if match:
            self.at = match.end()

    def peek(self):
        self.skip()
        return self.text[self.at : self.at + 1]

    def fail(self, expected):
        line = self.text.count("\n", 0, self.at) + 1
        found = self.text[self.at : self.at + 20] or "the end of the text"
        raise invalid(f"config: line {line}: expected {expected}, found {found!r}")

    def value(self):
        first = self.peek()
        if first == "{":
            return self.object()
        if first == "[":
            return self.array()
        if first in ('"', "'"):
            return self.quoted(first)
        return self.bare()

    def quoted(self, quote):
        end = self.at + 1
        while end < len(self.text) and self.text[end] != quote:
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            self.fail(f"a closing {quote}")
        body = self.text[self.at + 1 : end]
        if quote == "'":
            body = body.replace("\\'", "'").replace('"', '\\"')
        try:
            value = json.loads(f'"{body}"', strict=False)
        except ValueError:
            self.fail("a valid string")
        self.at = end + 1
        return value

    def bare(self):
        """A number, true, false, null, or an unquoted string."""
        match = re.compile(r"[^,\]}\s#]+").match(self.text, self.at)
        word = match.group() if match else ""
        rest = re.compile(r"[ \t]*(?=[,\]}\n#]|//|/\*|$)")
        constants = {"true": True, "false": False, "null": None, "Infinity": float("inf")}
        if word and rest.match(self.text, self.at + len(word)):
            if word in constants or _NUMBER.fullmatch(word):
                self.at += len(word)
                return constants[word] if word in constants else json.loads(word)
        line = re.compile(r"[^\n]*").match(self.text, self.at).group()
        if not line.strip() or line[0] in ",:]}":
            self.fail("a value")
        self.at += len(line)
        return line.strip()

    def object(self):
        self.at += 1
        result = {}
        while self.peek() != "}":
            quote = self.peek()
            if quote in ('"', "'"):
                key = self.quoted(quote)
            else:
                match = _KEY.match(self.text, self.at)
                if not match:
                    self.fail("a key or }")
                key = match.group()
                self.at = match.end()
            if self.peek() != ":":
                self.fail("':'")
            self.at += 1
            if key in result:
                raise invalid(f"config: the key {key!r} is given twice")
            result[key] = self.value()
            if self.peek() == ",":
                self.at += 1
        self.at += 1
        return result

    def array(self):
        self.at += 1
        result = []
        while self.peek() != "]":
            result.append(self.value())
            if self.peek() == ",":
                self.at += 1
        self.at += 1
        return result


def parse(text):
    """Returns the dictionary that `text` describes."""
    try:
        value = json.loads(text)
    except ValueError:
        parser = _Parser(text)
        value = parser.value() if parser.peek() == "{" else _Parser("{" + text + "\n}").value()
    if not isinstance(value, dict):
        raise invalid(
            f"config: expected an object of keys and values, found {type(value).__name__}"
        )
    return value


class DsConfig:
    """`text` as the daemon gets it, and `values`, the dictionary that it describes."""

    def __init__(self, source):
        self.text = _text_of(source)
        self.values = parse(self.text)

    def get(self, dotted, default=None):
        """The value at a dotted key; absent, null and "auto" give the default."""
        node = self.values
        for part in dotted.split("."):
            if not isinstance(node, dict) or part not in node:
                return default
            node = node[part]
        return default if node is None or node == "auto" else node

    def compute_dtype(self):
        if self.get("fp16.enabled", False) is True:
            return torch.float16
        if self.get("bf16.enabled", self.get("bfloat16.enabled", False)) is True:
            return torch.bfloat16
        return torch.float32

    def leaf_modules(self):
        """(classes, names, name suffixes) of zero_optimization.leaf_module; a bare string is one
        name."""
        result = []
        for key in ("classes", "names", "name_suffixes"):
            value = self.get("zero_optimization.leaf_module." + key, [])
            result.append([value] if isinstance(value, str) else list(value))
        return tuple(result)


def _text_of(source):
    if source is None:
        return "{}"
    if isinstance(source, DsConfig):
        return source.text
    if isinstance(source, dict):
        try:
            return json.dumps(source)
        except (TypeError, ValueError) as error:
            raise invalid(f"config: the dictionary cannot be written as JSON: {error}") from error
    if not isinstance(source, (str, os.PathLike)):
        raise invalid(f"config: expected a dictionary or a path, found {type(source).__name__}")
    text = os.fspath(source)
    if text.lstrip().startswith("{"):
        return text
    if os.path.isdir(text):
        raise invalid(f"config: {text} is a directory, not a file")
    if os.path.exists(text):
        with open(text, encoding="utf-8") as file:
            return file.read()
    try:
        decoded = base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        decoded = ""
    if decoded.lstrip().startswith("{"):
        return decoded
    raise invalid(f"config: no such file: {text}")
