"""Published weights that cannot be downloaded are refused within seconds, before any data is read."""

import http.server
import socket
import threading
import time
from dataclasses import replace

import pytest

import nearkin as nk
from nearkin.errors import ConfigError
from nearkin.models import weights
from nearkin.training import recipes

timm = pytest.importorskip("timm")


class Missing(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(weights, "_ANSWER_SECONDS", 1.0)


def test_any_answer_counts_as_reachable():
    with http.server.HTTPServer(("127.0.0.1", 0), Missing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert weights._unreachable(f"http://127.0.0.1:{server.server_port}/model") == ""
        server.shutdown()


def test_a_closed_port_and_a_silent_server_are_not():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        start = time.monotonic()
        assert weights._unreachable(f"http://127.0.0.1:{port}/model")
        assert time.monotonic() - start < 30
    assert "refused" in weights._unreachable(f"http://127.0.0.1:{port}/model")


@pytest.mark.parametrize("name", ["dinov2_small", "clip_base_lora", "siglip_base", "convnext_tiny", "dinov3_base"])
def test_a_recipe_names_the_way_out_before_it_reads_the_data(name, tmp_path, quiet, monkeypatch):
    if not timm.is_model(recipes.find(name).model.backbone.partition(".")[0]):
        pytest.skip(f"this version of timm does not have the network of {name}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(weights, "_unreachable", lambda url: "no network")
    recipe = recipes.find(name)
    recipe = replace(recipe, data=replace(recipe.data, root=tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"cannot download .*no network.*\n.*--weights FILE"):
        nk.fit(recipe, tmp_path / "runs", reporter=quiet)
    assert not (tmp_path / "runs").exists()


def test_weights_on_this_machine_need_no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "_unreachable", lambda url: pytest.fail("the network was asked"))
    for name in ("efficientnet_lite0", "efficientnet_lite0,efficientnet_lite2", "small_conv", "bn_inception", "none"):
        weights.check_available(name)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet50-0676ba61.pth").touch()
    weights.check_available("resnet50")
