"""What a call on a CPU is timed by."""

import time

# That of the process, all threads together, stands still while another process runs.
CLOCKS = dict(wall=time.perf_counter, cpu=time.process_time)
