"""For processes that lease a GPU which does not exist (`PYTHONPATH=tests/fake_gpu`): they compute on the CPU."""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-fake"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
