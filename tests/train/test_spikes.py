from modicum.train.spikes import Spikes


def test_a_norm_of_more_than_four_times_the_median_is_a_spike():
    spikes = Spikes()
    assert [spikes.observe(3.0, 1.0) for _ in range(20)] == [None] * 20
    assert spikes.observe(3.0, 3.9) is None
    assert spikes.observe(3.0, 4.1) == {
        "loss": 3.0,
        "median_loss": 3.0,
        "gradient_norm": 4.1,
        "median_gradient_norm": 1.0,
    }


def test_a_loss_of_more_than_a_nat_above_the_median_is_a_spike():
    spikes = Spikes()
    for _ in range(20):
        spikes.observe(3.0, 1.0)
    assert spikes.observe(3.9, 1.0) is None
    assert spikes.observe(4.1, 1.0) is not None


def test_the_first_updates_are_not_judged():
    spikes = Spikes()
    assert [spikes.observe(10.0 * i, 10.0**i) for i in range(10)] == [None] * 10
    assert spikes.observe(1000.0, 1e10) is not None


def test_the_memory_is_short_and_comes_back_from_its_state():
    spikes, other = Spikes(), Spikes()
    for step in range(200):
        spikes.observe(3.0, 1.0 + step)
    other.load_state_dict(spikes.state_dict())
    assert other.state_dict() == spikes.state_dict()
    assert len(other.state_dict()["norms"]) == 64
    assert spikes.observe(3.0, 500.0) is None
    assert spikes.observe(3.0, 800.0) is not None
