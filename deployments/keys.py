"""The key that zmq peers of one application show each other.

It lives in the key-value store of Ray's GCS: one per application and cluster, made by whoever asks first. So it survives replicas
and redeploys (a rolling update mixes old and new ones), and ends with the cluster.
"""

from __future__ import annotations

import secrets

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

NAMESPACE = "overlap_serve"
KEY_BYTES = 32


def application_key(app_name: str) -> bytes:
    """The application's key. Needs a connected Ray process; two round trips to the GCS, once per process."""
    name = f"zmq_key:{app_name}"
    # Put-if-absent, then read: of two replicas that start together both get the one that was stored.
    _internal_kv_put(name, secrets.token_bytes(KEY_BYTES), overwrite=False, namespace=NAMESPACE)
    key = _internal_kv_get(name, namespace=NAMESPACE)
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise RuntimeError(f"Ray's GCS does not hold a key of {KEY_BYTES} bytes for application {app_name!r}")
    return key
