import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    r = (yield).get_result()
    if r.failed:
        import sys
        print("\nFAILED", item.nodeid, "\n", str(r.longrepr)[-1500:], file=sys.stderr, flush=True)
