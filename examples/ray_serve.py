"""Two replicas of a model on Ray Serve, behind one address, for OpenAI's and Anthropic's clients.

    pip install 'kie[ray]'
    python examples/ray_serve.py                      # or: serve run examples.ray_serve:app

A conversation goes to the replica that has computed its beginning; one that is new goes to the one
with less to do. On GPUs: engine={"device": "cuda:0"}, actor={"num_gpus": 1}; on several machines
the same, in a Ray cluster.
"""

from __future__ import annotations

import sys

from kie.serve_ray import application
from ray import serve

app = application(replicas=2, engine={"device": "cpu", "threads": 1})

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app)
    print(f"http://127.0.0.1:{port}/v1", flush=True)
    sys.stdin.read()  # until its end, or Ctrl-C
    serve.shutdown()
