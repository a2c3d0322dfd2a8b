import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several test processes share the cores

from hypothesis import HealthCheck, settings

settings.register_profile("onfoot", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("onfoot")
