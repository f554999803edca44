"""Asking real processes for their stacks before they are ended: those that answer, and those that don't."""

from __future__ import annotations

from tests.rigs.agent_stand_in import run_stand_in


def test_those_that_answer_end_by_it_and_dump_no_core() -> None:
    facts = run_stand_in(
        """
        import resource
        workers = [start('''
            import faulthandler, resource
            faulthandler.enable()
            print("ready", flush=True)
            time.sleep(600)
        ''') for _ in range(3)]
        for worker in workers:
            read_line(worker.stdout_fd)
        os.kill(workers[1].pid, signal.SIGSTOP)
        until(lambda: tree.look_at(workers[1].pid).state == "T")
        stopper = begin_with_stacks(workers)
        result = finish(stopper)
        report(
            codes=[result.exits[w.pid].exitcode for w in workers],
            cores=[result.exits[w.pid].core_dumped for w in workers],
            killed=result.killed,
            seconds=result.seconds,
            states=[stopper.state_of(w.pid).state[0] for w in workers],
        )
        """
    )
    assert facts["codes"] == [-6] * 3
    assert facts["cores"] == [False] * 3
    assert facts["killed"] == 0
    assert facts["states"] == ["S", "T", "S"]


def test_the_main_thread_of_one_that_was_stopped_does_not_leave_its_place() -> None:
    """Its other threads go on at the same time, and any of them could have the signal in place of the main thread."""
    facts = run_stand_in(
        """
        from hpc_elastic.failures.stacks import find_dump
        workers = [start('''
            import faulthandler, threading
            faulthandler.enable()
            def innermost():
                os.kill(os.getpid(), signal.SIGSTOP)
            def elsewhere():
                while True:
                    pass
            for _ in range(30):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            print("ready", flush=True)
            innermost()
            elsewhere()
        ''') for _ in range(12)]
        pipes = [worker.take_output() for worker in workers]
        for out, _ in pipes:
            read_line(out)
        for worker in workers:
            until(lambda: tree.look_at(worker.pid).state == "T")
        stopper = begin_with_stacks(workers)
        finish(stopper)
        texts = []
        for _, err in pipes:
            os.set_blocking(err, True)
            with open(err) as file:
                texts.append(file.read())
        report(stood=[find_dump(text).main[-1].function for text in texts])
        """
    )
    assert facts["stood"] == ["innermost"] * 12


def test_one_that_holds_the_signal_back_answers_by_another_thread() -> None:
    facts = run_stand_in(
        """
        worker = start('''
            import faulthandler, threading
            faulthandler.enable()
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGABRT})
            print("ready", flush=True)
            time.sleep(600)
        ''')
        read_line(worker.stdout_fd)
        stopper = begin_with_stacks([worker])
        report(code=finish(stopper).exits[worker.pid].exitcode)
        """
    )
    assert facts["code"] == -6


def test_the_processes_of_a_loader_show_where_they_stood() -> None:
    facts = run_stand_in(
        """
        from hpc_elastic.failures.stacks import find_dump
        worker = start('''
            import faulthandler, multiprocessing
            faulthandler.enable()
            def fetch():
                print("ready", flush=True)
                time.sleep(600)
            context = multiprocessing.get_context("fork")
            child = context.Process(target=fetch, daemon=True)
            child.start()
            child.join()
        ''')
        out, err = worker.take_output()
        read_line(out)
        stopper = begin_with_stacks([worker])
        finish(stopper)
        os.set_blocking(err, True)
        with open(err) as file:
            dump = find_dump(file.read(), may_be_child=False)
        report(main=dump.main[-1].function, children=[child.main[-1].function for child in dump.children])
        """
    )
    assert facts["main"] == "poll"
    assert facts["children"] == ["fetch"]


def test_one_that_does_not_answer_is_ended_as_always() -> None:
    facts = run_stand_in(
        """
        from hpc_elastic.agent import hang_stop
        hang_stop.ANSWER_SECONDS = 1.0
        worker = start('''
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(600)
        ''')
        read_line(worker.stdout_fd)
        stopper = begin_with_stacks([worker])
        result = finish(stopper)
        report(code=result.exits[worker.pid].exitcode, pid=worker.pid,
               thread=stopper.state_of(worker.pid).threads[0].pid, where=stopper.state_of(worker.pid).whereabouts())
        """
    )
    assert facts["code"] == -15
    assert facts["thread"] == facts["pid"]
    assert facts["where"].startswith("S (sleeping)")
    assert "nanosleep" in facts["where"], "the wait channel or the system call says in what"


def test_who_hears_of_the_hang_later_has_its_stack_too() -> None:
    """On another node, in a collective, it would raise as soon as its peer is gone."""
    facts = run_stand_in(
        """
        from hpc_elastic.agent.hang_stop import HEAD_START_SECONDS, StacksThenStop, find_targets
        hung = start('''
            import faulthandler, socket
            faulthandler.enable()
            server = socket.create_server(("127.0.0.1", 0))
            print(server.getsockname()[1], flush=True)
            peer = server.accept()[0]
            print("ready", flush=True)
            time.sleep(600)
        ''')
        waits = start('''
            import faulthandler, socket
            faulthandler.enable()
            peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
            print("ready", flush=True)
            peer.recv(1)
            raise ConnectionResetError("the peer is gone")
        ''', read_line(hung.stdout_fd))
        for worker in (hung, waits):
            read_line(worker.stdout_fd)
        here, there = (
            StacksThenStop(
                find_targets([(worker, 0)]),
                stop.GroupStopper([worker], grace=30, clock=clock, excluding={other.pid}),
                clock=clock, head_start=HEAD_START_SECONDS,
            )
            for worker, other in ((hung, waits), (waits, hung))
        )
        here.begin()
        time.sleep(HEAD_START_SECONDS / 2)  # the news is on its way
        there.begin()
        first = finish(here)
        second = finish(there)
        report(hung=first.exits[hung.pid].exitcode, waits=second.exits[waits.pid].exitcode)
        """
    )
    assert facts == {"hung": -6, "waits": -6}


def test_a_hurry_gives_up_the_stacks() -> None:
    facts = run_stand_in(
        """
        worker = start('''
            signal.signal(signal.SIGABRT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(600)
        ''')
        read_line(worker.stdout_fd)
        stopper = begin_with_stacks([worker])
        stopper.kill_now()
        result = finish(stopper)
        report(code=result.exits[worker.pid].exitcode, seconds=result.seconds)
        """
    )
    assert facts["code"] == -9
    assert facts["seconds"] < 15.0, "the grace is 30 s"
