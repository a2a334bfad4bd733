"""``python -m jaxllm.data OUT_DIR PATH...``: see :mod:`jaxllm.data.shards`."""

from jaxllm.data.shards import main

if __name__ == "__main__":
    main()
