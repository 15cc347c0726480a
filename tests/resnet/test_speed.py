"""The env steps a second that a network allows, as `python -m resnet --speed` tells them."""


def test_a_network_that_computes_more_leaves_fewer_env_steps():
    import resnet
    from resnet.speed import env_steps_per_second

    small, large = (
        env_steps_per_second(resnet.build(name, (64, 64, 3)), rows=4) for name in ("linear", "impala")
    )
    assert small > 3 * large > 0
