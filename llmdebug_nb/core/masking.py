"""Secrets in texts: they are masked before a dump is written.

A text is masked if its argument's name says that it is a secret, and wherever it has the shape of
a known token. The mask is always the same, so it tells nothing of the secret: not its length, nor
whether two are equal. A keyed hash would tell that, and who finds the key could try guesses.
"""

from __future__ import annotations

import functools
import re

from llmdebug_nb.core.places import scrubbed

MASK = "<masked>"
_CACHE = 4096  # texts: arguments repeat in each call and step

# what a token looks like, and who says so. No pattern has two repetitions that can match the same
# text in turn, so none takes more than linear time.
_SHAPES = {
    "Hugging Face (huggingface.co/docs/hub/security-tokens)": r"\bhf_[A-Za-z0-9]{20,}",
    "OpenAI, Anthropic and others (gitleaks: openai-api-key, anthropic-api-key)": (
        r"(?<![\w-])sk-[\w-]{20,}"
    ),
    "GitHub (docs.github.com: about authentication to GitHub)": (
        r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,})"
    ),
    "GitLab (docs.gitlab.com: token prefixes)": r"\bgl(?:pat|dt|rt|cbt|ptt)-[\w-]{20,}",
    "AWS (docs.aws.amazon.com: IAM identifiers, unique ids)": (
        r"\b(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b"
    ),
    "Google (gitleaks: gcp-api-key)": r"\bAIza[\w-]{35}",
    "Slack (api.slack.com/concepts/token-types)": r"\bxox[a-z]-[A-Za-z0-9-]{10,}",
    "NVIDIA, Groq, Replicate, npm, PyPI, Databricks, Stripe (gitleaks: their rules)": (
        r"\b(?:nvapi-[\w-]{20,}|gsk_[A-Za-z0-9]{20,}|r8_[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}"
        r"|pypi-[\w-]{20,}|dapi[a-z0-9]{28,}|[rs]k_(?:live|test)_[A-Za-z0-9]{10,})"
    ),
    "JSON Web Token (RFC 7519; RFC 7515 for its parts)": (
        r"\beyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)*"
    ),
    "PEM (RFC 7468, section 10)": (
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----(?s:.*?)"
        r"(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)"
    ),
}
# what follows these words is a secret; the words stay
_BEFORE = {
    "Bearer (RFC 6750, section 2.1)": (
        r"\b(?i:bearer)\s{1,9}", r"(?=\S*\d|\S{20})[\w.~+/-]{8,}=*"
    ),
    "Basic (RFC 7617, section 2)": (r"\b(?i:basic)\s{1,9}", r"(?=\S*\d|\S{16})[A-Za-z0-9+/]{8,}=*"),
    "a signed URL (AWS Signature Version 4, Azure SAS, Google V4: query parameters)": (
        r"[?&](?i:sig|signature|x-amz-signature|x-amz-security-token|x-goog-signature|token"
        r"|[a-z_-]{0,20}_token|api_key|key)=",
        r"[^&\s'\"]{6,1000}",
    ),
    "a connection string (ADO.NET: keywords)": (
        r"(?i:(?<![\w-])(?:pwd|password|accountkey|sharedaccesskey)\s?=\s?)", r"[^;\s'\"]{4,500}"
    ),
    "the password in a URL (RFC 3986, section 3.2.1)": (
        r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://", r"[^\s/@:'\"]{0,200}:[^\s/@'\"]{1,500}(?=@)"
    ),
}  # fmt: skip
# names of secrets that nothing else has, in code and in settings
_SURE = (
    r"(?:secret|passw(?:or)?d|passphrase|credential|authorization"
    r"|(?:api|access|private|secret|auth|account|signing|encryption)[_-]?key"
    r"|(?:api|access|auth|hf|hub|git(?:hub|lab)|bearer|refresh|secret|wandb)[_-]?token)"
)
_NAME = rf"(?i:[\w-]{{0,60}}?{_SURE}[\w-]{{0,20}})"
_NAMED = rf"(?<![\w-]){_NAME}"  # tried once for each word
_TEXTS = "|".join([
        rf"(?P<quoted>{_NAMED}['\"]?\]?\s{{0,9}}(?::\s?\w{{1,20}}\s?)?[=:]\s{{0,9}}"
        r"[rbfuRBFU]{0,2}(?P<quote>['\"]))[^'\"\n]{1,500}(?=(?P=quote)|\n|\Z)",
        # --api-key 1x2y3z, API_KEY=1x2y3z; a digit tells a value from a name
        rf"(?P<bare>(?:(?<![\w-])--{_NAME}[= ]|{_NAMED}[=:]\s{{0,2}}))"
        r"(?=[^\s'\"]*\d)[^\s'\"(){}\[\],;<>]{6,}",
        *(f"(?P<before{n}>{words}){rest}" for n, (words, rest) in enumerate(_BEFORE.values())),
        *_SHAPES.values(),
    ])  # fmt: skip
# each secret has one of these in it, on the line that it begins on
_BLOCK = "-----begin"  # of any length
_HINTS = (
    r"hf_|sk[-_]|rk_|gsk_|r8_|npm_|pypi-|nvapi-|dapi|basic|sig=|signature=|token=|key=|pwd"
    r"|gh[pousr]_|_pat_|gl(?:pat|dt|rt|cbt|ptt)-|a[ksbc][ic]a|aiza|xox|eyj|://"
    rf"|{_BLOCK}|bearer|{_SURE}"
)
_HINT, _LOWER_HINT = re.compile(_HINTS, re.IGNORECASE), re.compile(_HINTS)
# characters: what may be on other lines of a secret than its hint has less, by the patterns above
_REACH = 1000
# names of arguments and attributes whose texts are secrets. LLM code has many with `key` and
# `token`: their values are numbers and tensors, which are never masked
_SECRET_NAME = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential|authoriz|cookie|token(?!i[sz])"
    r"|(?:api|access|private)_?keys?|(?<![a-z])(?:pwd|pw|auth|keys?)(?![a-z])"
)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# <s>, [PAD], <|endoftext|>; lists of numbers; None
_NO_SECRET = re.compile(
    r"</?\|?[^<>\s]{1,40}\|?>|\[[A-Z_]{1,20}\]|[\[(][-+\d\s.,:eE()\[\]]*[\])]|None|True|False|"
)


@functools.lru_cache(_CACHE)
def masked(text: str, name: str = "") -> str:
    """Return a text without secrets, and without the places that name a person.

    ``name``: of the argument or attribute whose value it is. If that says that the value is a
    secret, the mask takes the place of all of it.
    """
    if name and _SECRET_NAME.search(_CAMEL.sub("_", name).lower()):
        if not _NO_SECRET.fullmatch(text):
            return MASK
        return text
    return scrubbed(_without_secrets(text))


def _without_secrets(text: str) -> str:
    """Mask what has the shape of a secret. Only where there are hints it is looked for."""
    parts: list[str] = []
    done = 0
    for start, end in _stretches(text):
        parts += text[done:start], re.sub(_TEXTS, _replacement, text[start:end])
        done = end
    return "".join(parts) + text[done:]


def _stretches(text: str) -> list[tuple[int, int]]:
    """Return where secrets may be: whole lines, from one with a hint on as far as they may go."""
    # to fold the case of each character takes three times as long; others may get longer
    hints = _LOWER_HINT.finditer(text.lower()) if text.isascii() else _HINT.finditer(text)
    found: list[tuple[int, int]] = []
    for hint in hints:
        last = found[-1][1] if found else 0
        is_block = hint.group().lower() == _BLOCK
        reach = len(text) if is_block else min(hint.end() + _REACH, len(text))
        if found and reach <= last:
            continue
        is_apart = not found or hint.start() > last
        start = text.rfind("\n", last, hint.start()) + 1 if is_apart else found.pop()[0]
        end = text.find("\n", reach)
        found.append((start, len(text) if end < 0 else end))
    return found


def _replacement(found: re.Match[str]) -> str:
    kept = (text for name, text in found.groupdict().items() if text and name != "quote")
    return next(kept, "") + MASK


def masked_json(value: object) -> object:
    """Return a JSON value with all its texts masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked(str(key)): masked_json(each) for key, each in value.items()}
    return [masked_json(each) for each in value] if isinstance(value, (list, tuple)) else value
