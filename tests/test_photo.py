"""The one way to open an image. Oracles: Pillow's own functions, and what Chromium shows."""

import io
import os
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features

import shards.photo
from shards.photo import FORMATS, SUFFIXES, Photo, open_photo, plain_jpeg_size

NOISE = np.random.default_rng(3).integers(0, 255, (40, 50, 3), dtype=np.uint8)
Y, X = np.mgrid[0:48, 0:64]
# a different colour in every corner, smooth, so that lossy formats change it little
SMOOTH = np.stack([255 * X / 63, 255 * Y / 47, 127 + 100 * np.sin(X / 9)], -1).astype(np.uint8)
GREY = (SMOOTH.sum(-1) / 3).astype(np.uint8)


def encoded(image, kind="PNG", **more):
    file = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(file, kind, **more)
    return file.getvalue()


def exif(orientation):
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = orientation
    return tags


def pixels(data):
    return np.asarray(open_photo(data).whole()).astype(int)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@given(
    size=st.integers(1, 70),
    box=st.tuples(st.floats(0, 30), st.floats(0, 20), st.floats(31, 64), st.floats(21, 48)),
)
def test_a_grey_image_is_resized_as_pillow_resizes_it_in_rgb(kind, size, box):
    """It has one channel while it is resized: the same bytes, in less time."""
    data = encoded(GREY, kind)
    ours = open_photo(data).resized(box, size)
    image = Image.open(io.BytesIO(data))
    if kind == "JPEG":
        assume(min(box[2] - box[0], box[3] - box[1]) < 2 * size)  # else at a smaller scale
    pillow = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box)
    assert ours.mode == "RGB"
    assert ours.tobytes() == pillow.tobytes()


# ---- JPEG -----------------------------------------------------------------------------------------

JPEGS = {
    "baseline": encoded(NOISE, "JPEG"),
    "not subsampled": encoded(NOISE, "JPEG", quality=100, subsampling=0),
    "progressive": encoded(NOISE, "JPEG", progressive=True, comment=b"x" * 400),
    "stored as RGB": encoded(NOISE, "JPEG", keep_rgb=True),
    "grey": encoded(NOISE[..., 0], "JPEG"),
    "CMYK": encoded(Image.fromarray(NOISE).convert("CMYK"), "JPEG"),
    "turned": encoded(NOISE, "JPEG", exif=exif(1)),
}


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("size", [32, 8])
def test_a_jpeg_is_what_pillow_says_it_is(kind, size):
    """Small plain ones take a shorter path to the decoder."""
    data = JPEGS[kind]
    box = (5, 3, 45, 37)
    ours = open_photo(data, size).resized(box, size)
    pillow = Photo(Image.open(io.BytesIO(data))).resized(box, size)
    assert ours.tobytes() == pillow.tobytes()
    short = kind not in ("grey", "CMYK", "turned") and size == 32
    assert (open_photo(data, size).image.format is None) == short


def test_a_jpeg_that_breaks_off_or_lies_about_its_size_is_refused():
    data = JPEGS["baseline"]
    with pytest.raises(OSError, match="truncated"):
        open_photo(data[:-200], 32).whole()
    at = data.index(b"\xff\xc0") + 5
    huge = data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]
    with pytest.raises(Image.DecompressionBombError):
        open_photo(huge, 32)


@given(st.binary(max_size=60), st.integers(0, 400))
def test_any_bytes_may_be_asked_for_the_size_of_a_jpeg(tail, cut):
    data = JPEGS["baseline"]
    assert plain_jpeg_size(data) == (50, 40)
    plain_jpeg_size(data[: 2 + cut] + tail)
    assert plain_jpeg_size(tail) is None


# ---- turned ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_stands_upright(kind, orientation):
    data = encoded(NOISE, kind, exif=exif(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    photo = open_photo(data, 100)
    assert photo.size == upright.size
    assert photo.whole().tobytes() == upright.convert("RGB").tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [32, 8])
def test_a_box_lies_in_the_upright_photo(orientation, size):
    data = encoded(SMOOTH, "JPEG", quality=95, exif=exif(orientation))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    box = (5, 3, 31, 40)
    ours = open_photo(data, size).resized(box, size)
    expected = upright.resize((size, size), Image.Resampling.BILINEAR, box)
    difference = np.asarray(ours).astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= (1 if size == 32 else 6)


def test_an_orientation_that_does_not_exist_is_ignored():
    assert pixels(encoded(SMOOTH, "PNG", exif=exif(99))).tolist() == SMOOTH.tolist()


# ---- to 8 bits of RGB -----------------------------------------------------------------------------


def test_sixteen_bits_are_scaled():
    deep = Image.fromarray(GREY.astype(np.uint16) * 257)
    for kind in ("PNG", "TIFF"):
        assert (pixels(encoded(deep, kind)) == GREY[..., None]).all()


@pytest.mark.parametrize("top", [1.0, 255.0, 65535.0])
def test_floats_are_scaled_by_the_range_that_fits(top):
    values = (GREY / 255 * top).astype(np.float32)
    assert np.abs(pixels(encoded(values, "TIFF")) - GREY[..., None]).max() <= 1


def test_other_floats_are_scaled_from_lowest_to_highest():
    values = np.linspace(-3, 1e6, 48 * 64, dtype=np.float32).reshape(48, 64)
    found = pixels(encoded(values, "TIFF"))
    assert found[0, 0].tolist() == [0, 0, 0]
    assert found[-1, -1].tolist() == [255, 255, 255]
    assert (pixels(encoded(np.full((4, 4), -7.0, np.float32), "TIFF")) == 0).all()


def transparent(image):
    """The left half is transparent."""
    image = image.convert("RGBA")
    alpha = Image.fromarray(np.where(X < 32, 0, 255).astype(np.uint8))
    image.putalpha(alpha)
    return image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    image = transparent(Image.fromarray(SMOOTH))
    image = image.quantize(255) if mode == "P" else image.convert(mode)
    found = pixels(encoded(image, "PNG"))
    assert (found[:, :32] == 255).all()
    assert np.abs(found[:, 32:] - np.asarray(image.convert("RGB"))[:, 32:]).max() <= 1


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (pixels(data) == GREY[..., None]).all()


def test_heic_names_what_it_needs(monkeypatch):
    monkeypatch.setattr(shards.photo, "FORMATS", [name for name in FORMATS if name != "HEIF"])
    with pytest.raises(ValueError, match=r"a HEIC photo, which needs pip install 'dml\[heic\]'"):
        open_photo(encoded(SMOOTH, "HEIF"))
    with pytest.raises(UnidentifiedImageError):
        open_photo(b"no image")


@pytest.mark.parametrize("orientation", [1, 6])
def test_heic_is_turned_by_its_decoder_alone(orientation):
    """Its own property says how; what EXIF says is not for viewers."""
    photo = open_photo(encoded(SMOOTH, "HEIF", quality=95, exif=exif(orientation)))
    assert np.abs(np.asarray(photo.whole()).astype(int) - SMOOTH).mean() < 3


def test_every_suffix_is_one_that_can_be_opened():
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS}
    assert set(SUFFIXES) <= known


# ---- what Chromium shows ---------------------------------------------------------------------------

KINDS = {
    "plain.jpg": encoded(SMOOTH, "JPEG", quality=95),
    "turned-3.jpg": encoded(SMOOTH, "JPEG", quality=95, exif=exif(3)),
    "turned-6.jpg": encoded(SMOOTH, "JPEG", quality=95, exif=exif(6)),
    "turned-8.jpg": encoded(SMOOTH, "JPEG", quality=95, exif=exif(8)),
    "mirrored-5.jpg": encoded(SMOOTH, "JPEG", quality=95, exif=exif(5)),
    "grey.jpg": encoded(GREY, "JPEG", quality=95),
    "cmyk.jpg": encoded(Image.fromarray(SMOOTH).convert("CMYK"), "JPEG", quality=95),
    "plain.png": encoded(SMOOTH),
    "grey-16.png": encoded(Image.fromarray(GREY.astype(np.uint16) * 257)),
    "alpha.png": encoded(transparent(Image.fromarray(SMOOTH))),
    "grey-alpha.png": encoded(transparent(Image.fromarray(GREY)).convert("LA")),
    "palette.png": encoded(transparent(Image.fromarray(SMOOTH)).quantize(255)),
    "lossless.webp": encoded(transparent(Image.fromarray(SMOOTH)), "WEBP", lossless=True),
    "plain.gif": encoded(GREY, "GIF"),
    "plain.bmp": encoded(SMOOTH, "BMP"),
    **({"plain.avif": encoded(SMOOTH, "AVIF", quality=95)} if features.check("avif") else {}),
}
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-quic", "--force-color-profile=srgb", "--force-device-scale-factor=1"),
)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What Chromium shows of each kind: all of them on one page, one below the other."""
    browser = shutil.which("chromium")
    if browser is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed: make browser")
        pytest.skip("chromium is not installed: make browser")
    folder = tmp_path_factory.mktemp("chromium")
    places = ""
    for i, (name, data) in enumerate(KINDS.items()):
        (folder / name).write_bytes(data)
        places += f'<img src="{name}" style="position: absolute; left: 0; top: {100 * i}px">'
    (folder / "page.html").write_text(f'<body style="margin: 0; background: white">{places}</body>')
    command = [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size=100,{100 * len(KINDS)}", f"--screenshot={folder / 'screen.png'}"]
    subprocess.run([*command, f"file://{folder}/page.html"], check=True, capture_output=True)
    screen = np.asarray(Image.open(folder / "screen.png").convert("RGB")).astype(int)
    return dict(
        zip(KINDS, (screen[100 * i : 100 * (i + 1)] for i in range(len(KINDS))), strict=True)
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_photo_is_what_chromium_shows(shown, name):
    photo = open_photo(KINDS[name])
    w, h = photo.size
    ours, theirs = np.asarray(photo.whole()).astype(int), shown[name][:h, :w]
    assert (shown[name][h:, :] == 255).all(), "Chromium shows another size"
    assert (shown[name][:, w:] == 255).all(), "Chromium shows another size"
    difference = np.abs(ours - theirs)
    assert difference.mean() < 2, f"mean difference {difference.mean():.1f} of 255"
    assert np.quantile(difference, 0.99) < 12
