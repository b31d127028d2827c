"""A server that speaks S3 on this machine, and the environment in which clients find it."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

SECRETS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucket"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """A server with an empty bucket; yields the variables that are set in this process too."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    variables = {**SECRETS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those know other servers
    # All servers of a process share what they store.
    reset = urllib.request.Request(f"{variables['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=30).close()
    try:
        fsspec.filesystem("s3").mkdir(BUCKET)
        yield variables
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
