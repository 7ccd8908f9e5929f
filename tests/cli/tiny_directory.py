"""A tiny checkpoint directory with a byte tokenizer, and the command as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers

from jaxinfer.loading.tokenizer import BYTE_OF_CHARACTER
from tests.oracles.tiny_checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' and message['content'] == 'refuse' -%}
{{- raise_exception('no such system message') -}}
{%- endif -%}
{{ message['role'][0] }}:{{ message['content'] }}|
{%- endfor -%}a:"""


def write_model(directory: Path, *, chat: bool, family: str = "llama", **config: Any) -> Path:
    """Writes a tiny model whose token ids are bytes; `config` replaces entries of its config.json."""
    write_checkpoint(family, directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=dict(BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(directory / "tokenizer.json"))
    if chat:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


SCRIPT = "import sys; from jaxinfer.cli import main; sys.exit(main())"  # what the installed script does


def start(
    *arguments: str, cache: Path, redirect: str = "", script: str = SCRIPT, stdin: bool = False
) -> subprocess.Popen[bytes]:
    """Starts the command as a process with its own cache; `redirect` is the shell's, `stdin`: from a pipe."""
    command = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", script, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXINFER_CACHE": str(cache)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe if stdin else None, stdout=pipe, stderr=pipe)
