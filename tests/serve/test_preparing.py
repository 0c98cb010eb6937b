import asyncio
import threading
from types import SimpleNamespace

import pytest

from modicum.serve.errors import ApiError
from modicum.serve.limits import Limits
from modicum.serve.service import Service


def test_as_many_requests_are_prepared_at_once_as_the_engine_has_room_for():
    async def crowd():
        service, door = Service(load=lambda: None, limits=Limits()), threading.Event()
        service._served = SimpleNamespace(engine=SimpleNamespace(room=3))
        inside = [asyncio.create_task(service.prepare(door.wait)) for _ in range(3)]
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError) as refused:
            await service.prepare(lambda: None)
        door.set()
        assert await asyncio.gather(*inside) == [True] * 3
        assert await service.prepare(lambda: "room again") == "room again"
        return refused.value

    refused = asyncio.run(crowd())
    assert refused.status == 503
    assert "Retry-After" in refused.headers
