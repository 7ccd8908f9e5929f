import subprocess
import sys
import threading

from jaxinfer.loading.file_lock import file_lock


def test_one_holder_at_a_time(tmp_path):
    inside, most = 0, 0
    guard = threading.Lock()

    def work():
        nonlocal inside, most
        for _ in range(5):
            with file_lock(tmp_path / "lock", lambda: None):
                with guard:
                    inside += 1
                    most = max(most, inside)
                with guard:
                    inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (inside, most) == (0, 1)


def test_a_lock_is_waited_for_and_freed_when_its_holder_dies(tmp_path):
    script = (
        "import fcntl, sys, time; handle = open(sys.argv[1], 'w'); fcntl.flock(handle, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        waits = []

        def on_wait():
            waits.append(True)
            holder.kill()

        with file_lock(tmp_path / "lock", on_wait):
            assert waits
