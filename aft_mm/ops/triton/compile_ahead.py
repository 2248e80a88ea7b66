"""Compilation of kernels in parallel threads, before they are launched."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from triton import AsyncCompileMode
from triton.runtime import JITFunction, driver


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

    A kernel that cannot be compiled raises when it is launched.
    """
    run = JITFunction.run
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as executor:
        with _WithLaunchers(executor, ignore_errors=True):
            context = copy_context()  # has the mode, also in the threads of backward passes

            def compile_kernel(
                self: Any, *args: Any, grid: Any, warmup: bool, **options: Any
            ) -> Any:
                options.update(grid=grid, warmup=True)
                return context.copy().run(run, self, *args, **options)

            JITFunction.run = compile_kernel
            try:
                yield
            finally:
                JITFunction.run = run
