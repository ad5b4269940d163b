"""Sounds of any rate and format become samples of one channel at one rate, within bounds of size and time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from math import ceil, gcd
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from octavo.core.media import MediaInput, TypedArray, digest_of, typed_array
from octavo.errors import InvalidRequest, MissingLibrary

Samples = NDArray[np.float32]

FIELD: Final = "multi_modal_data.audio"
"""Where prompts have sounds."""
MAX_SECONDS: Final = 3600
"""Longest sound of a request."""
RATES: Final = range(1_000, 384_001)
"""Samples per second that are resampled."""
MAX_CHANNELS: Final = 8
_LOUDEST: Final = 2.0**31
_BLOCK_FRAMES: Final = 1 << 16
_ZERO_CROSSINGS: Final = 16
_STEPS: Final = 1024
"""Values of the kernel that are computed between two zero crossings; those between them are interpolated, which is
exact to 1e-6 and bounds the work for rates with many filters."""
_BETA: Final = 8.0
"""Shape of the Kaiser window: what is beyond the new Nyquist frequency is 80 dB lower."""


def decoded(data: bytes, rate: int, field: str, most_s: float = MAX_SECONDS) -> Samples:
    """Return the mean of the channels of a sound file (wav, flac, ogg, mp3), resampled to `rate`.

    most_s: seconds that it may last. Raises InvalidRequest about `field` for what is no sound or is beyond the limits,
    whatever its header says.
    """
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise MissingLibrary(f"sounds need soundfile: pip install 'octavo[audio]' ({error})", field=field) from error

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            source = file.samplerate
            _check_form(source, file.channels, field)
            most = most_s * source
            if file.frames > most and file.frames < 1 << 62:  # a stream of unknown length states the largest number
                raise _too_long(file.frames / source, field, most_s)
            num_frames, resampler = 0, Resampler(source, rate)
            for block in _blocks(file):
                mono = _finite(block.mean(axis=1, dtype=np.float32), num_frames, field)
                num_frames += len(mono)
                if num_frames > most:
                    raise _too_long(num_frames / source, field, most_s)
                resampler.add(mono)
    except (soundfile.LibsndfileError, RuntimeError) as error:
        reason = str(error).rpartition(": ")[2].partition("\n")[0][:200].removesuffix(".")
        raise InvalidRequest(
            f"{field} is no sound that can be decoded ({reason}); send wav, flac, ogg or mp3", field=field
        ) from error
    if not num_frames:
        raise _empty(field)
    return resampler.end()


def _blocks(file: Any) -> Iterator[NDArray[np.float32]]:
    """Yield the samples of a file, [time, channels]."""
    options: dict[str, Any] = {"dtype": "float32", "always_2d": True}
    if file.seekable():
        yield from file.blocks(_BLOCK_FRAMES, **options)
        return
    while len(block := file.read(_BLOCK_FRAMES, **options)):  # of codecs whose files have no way back
        yield block


def read_sound(value: Any, rate: int, field: str, most_s: float) -> Samples:
    """Return samples at `rate` of a file, or of what a caller in this process gives: samples, or samples and a rate.
    Raises InvalidRequest about `field`, also for more than so many seconds."""
    return decoded(value, rate, field, most_s) if isinstance(value, bytes) else read_array(value, rate, field, most_s)


def read_array(value: Any, rate: int, field: str, most_s: float = MAX_SECONDS) -> Samples:
    """Return samples at `rate` of what a caller in this process gives: samples at that rate, or samples and a rate.

    Samples are [time], or [channels, time]. Raises InvalidRequest about `field`.
    """
    source = rate
    if isinstance(value, Mapping) and "array" in value:
        value = (value["array"], value.get("sampling_rate", rate))
    if isinstance(value, tuple) and len(value) == 2:
        value, source = value
    if isinstance(source, bool) or not (isinstance(source, int) or (isinstance(source, float) and source.is_integer())):
        raise InvalidRequest(f"{field}: the sample rate is {source!r}, expected an integer", field=field)
    try:
        samples = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} is no array of samples ({error})", field=field) from error
    if samples.ndim == 2:
        _check_form(int(source), len(samples), field)
        samples = samples.mean(axis=0, dtype=np.float32)
    if samples.ndim != 1:
        raise InvalidRequest(f"{field} has {samples.ndim} dimensions, expected [time] or [channels, time]", field=field)
    return checked(samples, int(source), rate, field, most_s)


def checked(samples: Samples, source: int, rate: int, field: str, most_s: float = MAX_SECONDS) -> Samples:
    """Return samples of one channel resampled from `source` to `rate`. Raises InvalidRequest."""
    _check_form(source, 1, field)
    if not len(samples):
        raise _empty(field)
    if len(samples) > most_s * source:
        raise _too_long(len(samples) / source, field, most_s)
    return resampled(_finite(samples, 0, field), source, rate)


def resampled(samples: Samples, source: int, target: int) -> Samples:
    """Return samples at the rate `target`."""
    resampler = Resampler(source, target)
    resampler.add(samples)
    return resampler.end()


def cut_where_quiet(samples: Samples, rate: int, most_s: float) -> list[Samples]:
    """Return the pieces of a sound, each of at most so many seconds, cut in the quietest tenth of a second of the
    last ten before."""
    most, width = int(most_s * rate), max(1, rate // 10)
    searched = min(10 * rate, most // 3)
    pieces, rest = [], samples
    while len(rest) > most:
        last = min(most, len(rest) - searched)  # which leaves no tiny piece
        sums = np.cumsum(np.abs(rest[last - searched : last]), dtype=np.float64)
        quietest = int((sums[width:] - sums[:-width]).argmin()) if searched > width else 0
        stop = last - searched + quietest + width // 2
        pieces.append(rest[:stop])
        rest = rest[stop:]
    return [*pieces, rest]


class Resampler:
    """Makes samples at another rate by a windowed sinc, one filter for each place between two input samples.

    Of the input a few seconds are kept. The result does not depend on where it was cut.
    """

    def __init__(self, source: int, target: int) -> None:
        divisor = gcd(source, target)
        self._up, self._down = target // divisor, source // divisor
        self._cutoff = min(1.0, target / source)
        self._half = 0 if source == target else ceil(_ZERO_CROSSINGS / self._cutoff)
        # a whole number of periods of the filters, of about eight seconds
        self._turn = self._down * max(1, 8 * source // self._down)
        self._distances = np.arange((self._half + 1) * _STEPS + 1) / _STEPS
        self._kernel = _kernel(self._distances, self._cutoff, self._half + 1)
        self._filters: dict[int, Samples] = {}
        self._held = [np.zeros(self._half, np.float32)]
        """Input, of which the first `half` samples only surround what is next."""
        self._num_held = 0
        self._made: list[Samples] = []

    def add(self, samples: Samples) -> None:
        """Add input, of any length."""
        self._held.append(samples)
        self._num_held += len(samples)
        while self._num_held >= self._turn + self._half:
            whole = np.concatenate(self._held)
            self._made.append(self._filtered(whole[: self._turn + 2 * self._half], self._turn))
            self._held = [whole[self._turn :]]
            self._num_held -= self._turn

    def end(self) -> Samples:
        """Return all samples."""
        rest = np.concatenate([*self._held, np.zeros(self._half, np.float32)])
        self._made.append(self._filtered(rest, self._num_held))
        self._held = []
        return np.concatenate(self._made)

    def _filtered(self, surrounded: Samples, num_input: int) -> Samples:
        """Return what `num_input` samples become, before and behind which stand `half` others."""
        if not self._half:
            return surrounded
        out = np.zeros(ceil(num_input * self._up / self._down), np.float32)
        windows = sliding_window_view(surrounded, 2 * self._half + 1)  # [input, taps]
        for phase in range(min(self._up, len(out))):
            first, rest = divmod(phase * self._down, self._up)
            taps, rows = self._filter(phase, rest), windows[first :: self._down]
            count = len(range(phase, len(out), self._up))
            out[phase :: self._up] = np.ascontiguousarray(rows[:count]) @ taps
        return out

    def _filter(self, phase: int, rest: int) -> Samples:
        if phase not in self._filters:
            distances = np.abs(np.arange(-self._half, self._half + 1) - rest / self._up)
            self._filters[phase] = np.interp(distances, self._distances, self._kernel).astype(np.float32)
        return self._filters[phase]


def _kernel(distances: NDArray[np.float64], cutoff: float, end: int) -> NDArray[np.float64]:
    """Return the windowed sinc at distances in input samples, which is 0 from `end` on."""
    window = np.i0(_BETA * np.sqrt(np.maximum(0.0, 1 - (distances / end) ** 2))) / np.i0(_BETA)
    return cutoff * np.sinc(distances * cutoff) * window


def _finite(samples: Samples, first: int, field: str) -> Samples:
    """Return samples, of which the first is sample `first` of a sound. Raises InvalidRequest for no number."""
    unsound = ~(np.abs(samples) <= _LOUDEST)  # comparisons with NaN are false
    if unsound.any():
        place = int(unsound.argmax())
        raise InvalidRequest(
            f"{field}: sample {first + place} is {samples[place]}, expected a number near [-1, 1]", field=field
        )
    return samples


def _empty(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} has no samples; send a sound", field=field)


def _check_form(source: int, channels: int, field: str) -> None:
    if source not in RATES:
        raise InvalidRequest(
            f"{field} has {source:,} samples per second, expected {RATES.start:,} to {RATES.stop - 1:,}", field=field
        )
    if channels > MAX_CHANNELS:
        raise InvalidRequest(f"{field} has {channels} channels, expected at most {MAX_CHANNELS}", field=field)


def sound_input(arrays: Mapping[str, TypedArray | NDArray[Any] | int], num_vectors: int) -> MediaInput:
    """Return a sound or a part of one, without places in a prompt. arrays: what the encoder reads, by name."""
    typed = {
        name: each if isinstance(each, TypedArray) else typed_array(np.atleast_1d(each))
        for name, each in arrays.items()
    }
    return MediaInput("audio", digest_of(typed), (), num_vectors, typed)


def too_short(samples: Samples, rate: int, least: float | str) -> InvalidRequest:
    """Return the complaint that a sound lasts less than `least` seconds, of which an encoder makes nothing."""
    seconds = len(samples) / rate
    return InvalidRequest(f"{FIELD} lasts {seconds:.3f} s, expected at least {least} s", field=FIELD)


def _too_long(seconds: float, field: str, most_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"{field} lasts {seconds:,.1f} s or more, expected at most {most_s:,g} s; send it in parts",
        field=field,
        code="request_too_large",
    )
