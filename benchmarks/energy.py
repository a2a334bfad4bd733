"""The energy that a GPU takes, in joules, from the counter of its driver (NVML).

Under a long load a GPU lowers its clock to stay within its power limit. Then the energy of a step
says more of its time than what it computes and reads.
"""

import ctypes


def joules_so_far() -> float | None:
    """What the machine's GPU has taken since the driver was loaded.

    The counter is renewed now and then, so only differences over seconds tell.

    Returns:
        Joules; None without the driver's library, for a GPU without the counter, and where there
        are several GPUs: the work may be on any of them.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpus, gpu, millijoules = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_ulonglong()
    if nvml.nvmlInit_v2():
        return None
    try:
        failed = (
            nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus))
            or gpus.value != 1
            or nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(gpu))
            or nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules))
        )
        return None if failed else millijoules.value / 1e3
    finally:
        nvml.nvmlShutdown()
