"""Keys and seals: an ed25519 key made on first use, and DSSE envelopes around in-toto statements.

Who may seal is a reviewed file in `ledger/keys/`; a signature by any other key seals nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import msgspec

from ledger.record import Record, encode
from ledger.state import state_dir

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"


class SealError(ValueError):
    """A signature or key file that is not what it says."""


class AllowedKey(Record, kw_only=True):
    """One file of `ledger/keys/`: a public key, and for whom and which cluster it speaks (reviewed words)."""

    keyid: str
    keytype: str = "ed25519"
    scheme: str = "ed25519"
    keyval: dict[str, str]
    label: str = ""
    cluster: str = ""


def key_folder() -> Path:
    return state_dir() / "keys"


def own_signer():
    """This user's signer; the private key is made on first use, readable by its owner alone."""
    from securesystemslib.signer import CryptoSigner

    path = key_folder() / "ed25519.pem"
    if not path.exists():
        _write_private(path, CryptoSigner.generate_ed25519().private_bytes)
    return _load_signer(path)


def _load_signer(path: Path):
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from securesystemslib.signer import CryptoSigner

    try:
        return CryptoSigner(load_pem_private_key(path.read_bytes(), None))
    except ValueError as error:
        raise SealError(f"{path.name} is not a private key: {error}; move it away and a new one is made") from error


def own_secret() -> bytes:
    """The secret that turns names into pseudonyms; without it none can be guessed."""
    path = key_folder() / "secret"
    if not path.exists():
        _write_private(path, secrets.token_bytes(32))
    return path.read_bytes()


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return  # another process made it first; there is one key


def public_file(signer, label: str = "", cluster: str = "") -> AllowedKey:
    """The file to commit under `ledger/keys/` so that this key may seal."""
    key = signer.public_key
    return AllowedKey(keyid=key.keyid, keytype=key.keytype, scheme=key.scheme, keyval=dict(key.keyval),
                      label=label or key.keyid[:12], cluster=cluster)  # fmt: skip


def allowed_keys(folder: Path) -> dict[str, AllowedKey]:
    """The keys that may seal, by id. Raises SealError for a file that is none, or whose id is not its key's."""
    found: dict[str, AllowedKey] = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            key = msgspec.json.decode(path.read_bytes(), type=AllowedKey)
        except msgspec.MsgspecError as error:
            raise SealError(f"ledger/keys/{path.name} is not a key file: {error}") from error
        if _keyid(key) != key.keyid:
            raise SealError(f"ledger/keys/{path.name}: its keyid is not the digest of its key")
        if key.keyid in found:
            raise SealError(f"ledger/keys/{path.name}: the same key is listed twice")
        found[key.keyid] = key
    return found


def _keyid(key: AllowedKey) -> str:
    from securesystemslib.formats import encode_canonical

    body = {"keytype": key.keytype, "scheme": key.scheme, "keyval": key.keyval}
    return hashlib.sha256(encode_canonical(body).encode()).hexdigest()


def statement(subjects: dict[str, str], predicate: dict[str, Any], kind: str) -> bytes:
    """An in-toto statement: these digests, and what is said of them."""
    return encode({
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": value}} for name, value in sorted(subjects.items())],
        "predicateType": kind,
        "predicate": predicate,
    })  # fmt: skip


def seal(payload: bytes, signer=None) -> dict[str, Any]:
    """A DSSE envelope around `payload`, signed if a signer is given."""
    from securesystemslib.dsse import Envelope

    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    if signer is not None:
        envelope.sign(signer)
    return envelope.to_dict()


def opened(envelope: dict[str, Any]) -> dict[str, Any]:
    """The statement inside an envelope. Raises SealError if it is none."""
    try:
        found = json.loads(base64.b64decode(envelope["payload"], validate=True))
    except (KeyError, TypeError, binascii.Error, ValueError) as error:
        raise SealError(f"the envelope holds no statement: {error}") from error
    if envelope.get("payloadType") != PAYLOAD_TYPE or found.get("_type") != STATEMENT_TYPE:
        raise SealError("the envelope is not an in-toto statement")
    return found


def sealed_by(envelope: dict[str, Any], keys: dict[str, AllowedKey]) -> tuple[list[AllowedKey], list[str]]:
    """(allowed keys whose signature is good, ids of unknown keys). Raises SealError for a bad signature."""
    if not envelope.get("signatures"):
        return [], []
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError
    from securesystemslib.signer import SSlibKey

    body = Envelope.from_dict(json.loads(json.dumps(envelope)))
    good, unknown = [], []
    for keyid in sorted(body.signatures):
        if (key := keys.get(keyid)) is None:
            unknown.append(keyid)
            continue
        public = SSlibKey(key.keyid, key.keytype, key.scheme, key.keyval)
        try:
            body.verify([public], 1)
        except VerificationError as error:
            raise SealError(f"the signature of {key.label or keyid[:12]} does not fit the file") from error
        good.append(key)
    return good, unknown
