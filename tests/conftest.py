"""Eight fake CPU devices for the whole test session, set before anything asks for a device."""

import jax

jax.config.update('jax_num_cpu_devices', 8)
