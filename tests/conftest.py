"""Gives every test eight CPU devices, unless AUTOPAR_TEST_GPU asks for the real accelerator.

JAX reads these variables once, so they are set here, before any test module imports it.
"""

import os

if not os.environ.get("AUTOPAR_TEST_GPU"):
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling quickly matters more than the code that comes out.
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
