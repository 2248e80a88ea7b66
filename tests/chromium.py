"""A page in headless Chromium, controlled through the DevTools protocol over a pipe."""

import json
import os
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None
)
KEYS = dict(ArrowLeft=37, ArrowUp=38, ArrowRight=39, ArrowDown=40)
SHIFT = 8


class Page:
    def __init__(self, path: Path, folder: Path, dark: bool = False, phone: bool = False) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # Chromium reads commands from file descriptor 3 and writes responses to 4.
        command = (
            f'exec {CHROMIUM} --headless --no-sandbox --disable-gpu --remote-debugging-pipe '
            f'--user-data-dir={folder} --window-size=1400,1500 3<&{read} 4>&{write}'
        )
        self._process = subprocess.Popen(
            ['bash', '-c', command],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._answers, self._number, self._session = b'', 0, {}
        self.errors: list[dict] = []
        target = self.call('Target.createTarget', url='about:blank')['targetId']
        session = self.call('Target.attachToTarget', targetId=target, flatten=True)['sessionId']
        self._session = dict(sessionId=session)
        scheme = dict(name='prefers-color-scheme', value='dark' if dark else 'light')
        self.call('Emulation.setEmulatedMedia', features=[scheme])
        if phone:
            size = dict(width=360, height=740, deviceScaleFactor=2, mobile=True)
            self.call('Emulation.setDeviceMetricsOverride', **size)
        self.call('Runtime.enable')
        self.call('Page.navigate', url=path.as_uri())
        end = time.monotonic() + 60
        while self.run('document.documentElement?.dataset.ready') != 'yes':
            assert time.monotonic() < end and not self.errors, self.errors
            time.sleep(0.05)

    def call(self, method: str, **parameters):
        self._number += 1
        message = dict(id=self._number, method=method, params=parameters, **self._session)
        os.write(self._write, json.dumps(message).encode() + b'\0')
        while True:
            while b'\0' not in self._answers:
                part = os.read(self._read, 2**16)
                assert part, 'Chromium has ended'
                self._answers += part
            first, self._answers = self._answers.split(b'\0', 1)
            answer = json.loads(first)
            if answer.get('method') == 'Runtime.exceptionThrown':
                self.errors.append(answer['params']['exceptionDetails'])
            if answer.get('id') == self._number:
                assert 'error' not in answer, answer
                return answer['result']

    def run(self, script: str):
        result = self.call('Runtime.evaluate', expression=script, returnByValue=True)
        assert 'exceptionDetails' not in result, result
        return result['result'].get('value')

    def mouse(self, element: str, x: float, y: float, click: bool = True) -> None:
        """Move the mouse to a position in pixels of an element, and click."""
        self.run(f'document.getElementById({element!r}).scrollIntoView({{block: "center"}})')
        box = self.run(f'document.getElementById({element!r}).getBoundingClientRect().toJSON()')
        place = dict(x=box['x'] + x, y=box['y'] + y)
        self.call('Input.dispatchMouseEvent', type='mouseMoved', **place)
        for kind in ('mousePressed', 'mouseReleased') if click else ():
            self.call('Input.dispatchMouseEvent', type=kind, button='left', clickCount=1, **place)

    def key(self, element: str, name: str, shift: bool = False) -> None:
        self.run(f'document.getElementById({element!r}).focus()')
        for kind in ('rawKeyDown', 'keyUp'):
            self.call(
                'Input.dispatchKeyEvent',
                type=kind,
                key=name,
                code=name,
                windowsVirtualKeyCode=KEYS[name],
                modifiers=SHIFT * shift,
            )

    def screenshot(self, path: Path) -> None:
        picture = self.call('Page.captureScreenshot', captureBeyondViewport=True)
        path.write_bytes(b64decode(picture['data']))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
