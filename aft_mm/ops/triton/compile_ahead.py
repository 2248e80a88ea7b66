"""Compilation of kernels in parallel threads, before they are launched."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime import JITFunction, driver
from triton.runtime._async_compile import AsyncCompileMode, active_mode


class _WithLaunchers(AsyncCompileMode):
    """Triton's mode, which also builds the launcher of each kernel, by the C compiler."""

    def submit(self, key: Any, compile_fn: Any, finalize_fn: Any) -> Any:
        def compile_both() -> Any:
            kernel = compile_fn()
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(key, compile_both, finalize_fn)


@contextmanager
def compile_only() -> Iterator[None]:
    """Compile kernels in threads instead of launching them, and wait for the last one at the end.

    Results of ops are not computed. A kernel that cannot be compiled raises when it is launched.
    """
    run = JITFunction.run
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        mode = _WithLaunchers(executor, ignore_errors=True)

        def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            token = active_mode.set(mode)  # also in the threads of backward passes
            try:
                return run(self, *args, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(token)

        JITFunction.run = compile_kernel
        try:
            with mode:
                # The mode of this thread, which the calls set themselves.
                active_mode.set(None)
                yield
        finally:
            JITFunction.run = run
