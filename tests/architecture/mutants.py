"""Faults that a test must catch, as changes of one place of the code: in storage, access, streams, pages and shards.

Each stands for a promise that its room makes to whoever relies on it. `tests/architecture/test_mutants.py` applies them.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault: in the file, `text` becomes `replacement`, and the test fails."""

    file: str
    text: str
    replacement: str
    test: str


MUTANTS = {
    "a status that changes while the one before is written is told to no watcher": Mutant(
        "broker/rpc/health.py",
        "                changed.clear()\n                if (answer := self._answer(request)) != told:\n"
        "                    await context.write(answer)\n                    told = answer\n",
        "                if (answer := self._answer(request)) != told:\n"
        "                    await context.write(answer)\n                    told = answer\n"
        "                changed.clear()\n",
        "tests/unit/rpc/test_health.py::test_a_status_that_changes_while_the_one_before_is_read_is_told",
    ),
    "the process of a shard begins empty where its disk went": Mutant(
        "broker/shards/shard_process.py",
        "    refuse_lost_shard(LocalVfs(), config.data_dir, number)\n",
        "",
        "tests/process/test_shards.py::test_a_shard_whose_disk_goes_while_others_serve_does_not_begin_empty",
    ),
    "a record of a newer version is applied without what is new in it": Mutant(
        "broker/storage/manifest.py",
        "    message = kind.FromString(bytes(body))\n    check_known(message)\n",
        "    message = kind.FromString(bytes(body))\n",
        "tests/unit/storage/test_records.py::test_a_field_that_a_newer_version_decided_by_is_not_passed_over",
    ),
    "numbers of the caller that do not rise are made to": Mutant(
        "clients/python/postdate/_encode.py",
        "    if first < 0x80 or not all(map(eq, sequence_ids, range(first, first + len(sequence_ids)))):",
        "    if first < 0x80 or sequence_ids[-1] - first != len(sequence_ids) - 1:",
        "tests/unit/client/test_client_encode.py::test_numbers_of_the_caller_are_written_as_given",
    ),
    "moments that are equal are sent as one": Mutant(
        "clients/python/postdate/_encode.py",
        "    if first is values[-1] and all(map(is_, values, repeat(first))):",
        "    if first is values[-1] and values.count(first) == len(values):",
        "tests/unit/client/test_client_encode.py"
        "::test_moments_that_are_equal_and_not_the_same_are_told_apart",
    ),
    "the reason of a nack is not kept": Mutant(
        "broker/subscriptions/decisions.py",
        "                waits.append(self._give_back(consumer_id, some, ReturnReason.NACKED, until_ms, reason))",
        "                waits.append(self._give_back(consumer_id, some, ReturnReason.NACKED, until_ms))",
        "tests/wire/test_dead_letters.py::test_the_last_reason_is_kept_with_the_attempts_and_over_a_restart",
    ),
    "the reason of a nack is not told where a message is shown": Mutant(
        "broker/rpc/schedule.py",
        "        return encode_returned(encoded, returned, frame_bytes_max) if returned else encoded",
        "        return encoded",
        "tests/wire/test_schedule.py::test_what_came_back_is_shown_by_id_until_it_is_settled",
    ),
    "an extended lease costs what all the others do": Mutant(
        "broker/subscriptions/leases.py",
        "        self._deadlines.put(deadline_ns, entries)\n        self._none_before_ns",
        "        all_of = [without_entries(each, entries) for each in getattr(self, '_all', [])]\n"
        "        self._all = [*(each for each in all_of if each), entries]\n"
        "        self._deadlines.put(deadline_ns, entries)\n        self._none_before_ns",
        "tests/wire/test_subscribe.py"
        "::test_another_topic_s_produce_is_as_quick_beside_ten_thousand_leases_extended_one_by_one_as_beside_few",
    ),
    "the reason of a nack is not logged": Mutant(
        "broker/subscriptions/requests.py",
        "        subscription.logs.nacked.note(told, reason=reason)",
        "        pass",
        "tests/wire/test_sdk_schedule.py::test_get_shows_the_reason_of_the_last_nack",
    ),
    "calls that only begin keep their places": Mutant(
        "broker/rpc/reception.py",
        "            oldest = self._beginning.oldest_of_most()\n            if oldest is None:\n",
        "            oldest = None\n            if oldest is None:\n",
        "tests/wire/test_reception.py::test_calls_that_only_begin_give_way",
    ),
    "who is refused takes a place": Mutant(
        "broker/rpc/port.py",
        "        self.interceptors.append(Reception(host, self._silent, self._unfinished))",
        "        self.interceptors.insert(0, Reception(host, self._silent, self._unfinished))",
        "tests/wire/test_reception.py::test_strangers_are_refused_by_their_headers_and_take_no_place",
    ),
    "calls take the places of probes": Mutant(
        "broker/rpc/reception.py",
        "                kind = CallKind.PROBE if rule.is_public else CallKind.LONG",
        "                kind = CallKind.SHORT if rule.is_public else CallKind.LONG",
        "tests/wire/test_reception.py::test_calls_take_no_place_of_probes_and_are_bounded",
    ),
    "streams take the places of probes": Mutant(
        "broker/rpc/reception.py",
        "                kind = CallKind.PROBE if rule.is_public else CallKind.LONG",
        "                kind = CallKind.LONG",
        "tests/wire/test_reception.py::test_streams_take_no_place_of_calls_and_are_bounded",
    ),
    "a short write goes on at the wrong offset": Mutant(
        "broker/runtime/vfs.py",
        "                        done += os.pwrite(self._fd, rest[done:], offset + done)",
        "                        done += os.pwrite(self._fd, rest[done:], offset)",
        "tests/unit/runtime/test_vfs.py::test_a_short_write_goes_on_where_it_ended",
    ),
    "a file is not synced": Mutant(
        "broker/runtime/vfs.py",
        "            os.fdatasync(self._fd)",
        "            pass",
        "tests/unit/runtime/test_vfs.py::test_a_sync_is_a_sync_of_that_file",
    ),
    "a folder is not synced": Mutant(
        "broker/runtime/vfs.py",
        "            os.fsync(fd)",
        "            pass",
        "tests/unit/runtime/test_vfs.py::test_a_sync_of_a_folder_is_a_sync_of_that_folder",
    ),
    "symbolic links are followed": Mutant(
        "broker/runtime/vfs.py",
        "        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW\n",
        "        flags = os.O_RDWR | os.O_CLOEXEC\n",
        "tests/unit/runtime/test_vfs.py::test_symbolic_links_are_not_followed",
    ),
    "a file that is there counts as made": Mutant(
        "broker/runtime/vfs.py",
        "            flags |= os.O_CREAT | os.O_EXCL",
        "            flags |= os.O_CREAT",
        "tests/unit/runtime/test_vfs.py::test_symbolic_links_are_not_followed",
    ),
    "a read in memory answers with what is not there": Mutant(
        "broker/runtime/vfs.py",
        "        return bytes(block) if count == length else None",
        "        return bytes(block)",
        "tests/unit/runtime/test_vfs.py::test_a_read_that_does_not_wait_answers_all_or_nothing",
    ),
    "two processes hold the lock": Mutant(
        "broker/runtime/vfs.py",
        "            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        "tests/unit/runtime/test_vfs.py::test_one_process_holds_the_lock",
    ),
    "a file that cannot be looked at is absent": Mutant(
        "broker/runtime/vfs.py",
        "        except (FileNotFoundError, NotADirectoryError):\n            return False",
        "        except OSError:\n            return False",
        "tests/unit/runtime/test_vfs.py::test_what_cannot_be_looked_at_is_not_absent",
    ),
    "a short read goes on at its beginning": Mutant(
        "broker/runtime/vfs.py",
        "        missing = length - len(block)\n        while missing and (block := os.pread(self._fd, missing, offset + length - missing)):",
        "        missing = length - len(block)\n        while missing and (block := os.pread(self._fd, missing, offset)):",
        "tests/unit/runtime/test_vfs.py::test_a_short_read_goes_on_until_the_end_of_the_file",
    ),
    "a failed write may be tried again": Mutant(
        "broker/runtime/vfs.py",
        "        raise WriteFailed(error.errno, error.strerror, path) from error",
        "        raise",
        "tests/unit/runtime/test_vfs.py::test_a_read_only_file_system_can_be_read",
    ),
    "a group is answered before its sync": Mutant(
        "broker/storage/local_group_log.py",
        "            self._file.pwrite(parts, self._end)\n            started_ns = self._clock.monotonic_ns()\n            self._file.sync()\n",
        "            self._file.pwrite(parts, self._end)\n            started_ns = self._clock.monotonic_ns()\n",
        "tests/unit/storage/test_local_group_log.py::test_what_was_answered_before_a_failed_write_is_there_after_a_crash",
    ),
    "the segment that holds the lsn is dropped": Mutant(
        "broker/storage/local_group_log.py",
        "            count = max(bisect_right(self._segments, lsn) - 1, 0)",
        "            count = max(bisect_right(self._segments, lsn), 0)",
        "tests/unit/storage/test_local_group_log.py::test_a_full_segment_is_followed_by_a_recycled_one",
    ),
    "a journal may end where the manifests do not": Mutant(
        "broker/storage/local_group_log.py",
        "        if end.next_lsn <= needed_to_lsn:",
        "        if end.next_lsn < needed_to_lsn:",
        "tests/unit/storage/test_local_group_log_opening.py::test_a_journal_must_reach_what_the_manifests_hold",
    ),
    "damage before a good group is a torn tail": Mutant(
        "broker/storage/segment.py",
        "    later = find_commit(data, first_lsn, group_start_min=end.offset + 1)\n    if later is not None:\n        raise",
        "    later = find_commit(data, first_lsn, group_start_min=end.offset + 1)\n    if later is not None and later < 0:\n        raise",
        "tests/unit/storage/test_local_group_log_opening.py::test_damage_before_a_good_group_is_refused_and_left_as_it_is",
    ),
    "a COMMIT vouches for any records": Mutant(
        "broker/storage/segment.py",
        "            expected = (start, len(records), group_crc(record.crc for record in records))",
        "            expected = (start, len(records), commit.crc if commit else 0)",
        "tests/unit/storage/test_frame.py::test_a_group_holds_only_the_records_that_its_commit_names",
    ),
    "a failed journal goes on": Mutant(
        "broker/storage/journal.py",
        "        self._failed = failure\n        waiting",
        "        self._failed = None\n        waiting",
        "tests/unit/storage/test_journal.py::test_a_bug_in_apply_stops_the_journal",
    ),
    "the times of a ledger are not synced": Mutant(
        "broker/storage/ledger_files.py",
        "            handles.data.sync()\n            handles.times.sync()\n            handles.rows.sync()",
        "            handles.data.sync()\n            handles.rows.sync()",
        "tests/unit/storage/test_ledger_recovery.py::test_a_persisted_capture_survives_every_crash_after_it",
    ),
    "files are closed under a reader": Mutant(
        "broker/storage/ledger_files.py",
        "            if handles.doomed and not handles.pins:\n                handles.close()\n            elif",
        "            if handles.doomed:\n                handles.close()\n            elif",
        "tests/unit/storage/test_ledger.py::test_files_4_files_in_use_are_not_closed",
    ),
    "a lack of descriptors is a bad sector": Mutant(
        "broker/storage/ledger_files.py",
        "        if error.errno in _LACKS:\n            return False",
        "        if error.errno in ():\n            return False",
        "tests/crash/test_bad_sectors.py::test_what_the_process_lacks_is_no_fault_of_the_file",
    ),
    "blocks are not verified": Mutant(
        "broker/storage/blocks.py",
        "            and value(block) == self._crcs[block_index]",
        "            and value(block) >= 0",
        "tests/unit/storage/test_ledger_recovery.py::test_files_3_a_changed_byte_is_found_when_it_is_read",
    ),
    "revisions are not counted on": Mutant(
        "broker/storage/amendments.py",
        "            revisions[moved] += self.revisions[places[moved]]",
        "            revisions[moved] = self.revisions[places[moved]]",
        "tests/unit/storage/test_amendments.py::test_cancels_and_moves_gather_and_what_was_before_does_not_change",
    ),
    "reading around damage has no bound": Mutant(
        "broker/storage/salvage.py",
        "                halvings_left = max(0, halvings_left - 1)",
        "                halvings_left = max(1, halvings_left - 1)",
        "tests/unit/storage/test_salvage.py::test_hostile_damage_costs_a_bounded_amount",
    ),
    "a name of a backup may go on with anything": Mutant(
        "broker/storage/backup_marker.py",
        '    return _NAME.fullmatch(name) is not None and not name.endswith(".partial")',
        '    return _NAME.match(name) is not None and not name.endswith(".partial")',
        "tests/unit/storage/test_backup_marker.py::test_names_sort_as_times_do_and_are_safe",
    ),
    "a header that must be understood is passed over": Mutant(
        "broker/rpc/json_web_tokens.py",
        '        if "crit" in header:',
        '        if "crit" in header and False:',
        "tests/unit/rpc/test_access_files.py::test_header_that_must_be_understood_is_refused_whatever_the_library_does",
    ),
    "an algorithm that is not allowed is taken": Mutant(
        "broker/rpc/json_web_tokens.py",
        "        if algorithm not in key.algorithms & rules.algorithms:",
        "        if algorithm not in key.algorithms:",
        "tests/unit/rpc/test_access_files.py::test_key_is_used_for_its_own_algorithm_and_id_only",
    ),
    "a token lasts a millisecond longer": Mutant(
        "broker/rpc/access_identity.py",
        "        if known.expires_at_ms <= now_ms:",
        "        if known.expires_at_ms < now_ms:",
        "tests/unit/rpc/test_access_files.py::test_a_token_ends_at_its_millisecond",
    ),
    "any issuer will do": Mutant(
        "broker/rpc/json_web_tokens.py",
        "                issuer=rules.issuer,\n",
        "",
        "tests/wire/test_access.py::test_what_proves_nothing_is_refused",
    ),
    "a common name passes for a URI": Mutant(
        "broker/rpc/client_certificates.py",
        '    if len(common) != 1 or "/" in common[0]:',
        "    if len(common) != 1:",
        "tests/wire/test_access.py::test_certificate_is_a_principal",
    ),
    "a token that is somebody else's now keeps its stream": Mutant(
        "broker/rpc/access.py",
        "            if identity.principal != caller.principal:",
        '            if identity.principal == "":',
        "tests/wire/test_access_streams.py::test_token_that_is_somebody_elses_now_ends_the_stream",
    ),
    "a stream outlives its right": Mutant(
        "broker/rpc/access.py",
        "        caller.check_held()\n",
        "",
        "tests/wire/test_access_streams.py::test_right_that_is_withdrawn_ends_the_stream",
    ),
    "an answer is given for which nobody asked": Mutant(
        "broker/rpc/access.py",
        "            if not caller.is_checked:",
        "            if caller is None:",
        "tests/wire/test_access.py::test_answer_for_which_nobody_asked_is_not_given",
    ),
    "a grant for subscriptions is one for the broker": Mutant(
        "broker/rpc/access_grants.py",
        "            return self.is_for_all_topics and self.subscriptions is None",
        "            return self.is_for_all_topics",
        "tests/unit/rpc/test_access_files.py::test_what_no_grant_allows_is_denied",
    ),
    "a grant for subscriptions is one for their topic": Mutant(
        "broker/rpc/access_grants.py",
        "        return ask.subscription is not None and _matches(self.subscriptions, ask.subscription)",
        "        return ask.subscription is None or _matches(self.subscriptions, ask.subscription)",
        "tests/unit/rpc/test_access_files.py::test_what_no_grant_allows_is_denied",
    ),
    "a dead letter topic is a way into others": Mutant(
        "broker/rpc/access_rules.py",
        "    if request.policy.dead_letter_topic:  # or",
        "    if request.policy.dead_letter_topic and False:  # or",
        "tests/wire/test_access.py::test_dead_letter_topic_is_no_way_into_other_topics",
    ),
    "an open produce stream outlives its right": Mutant(
        "broker/rpc/caller.py",
        "        if grants is not self._allowed_by or topic != self._allowed_topic:",
        "        if topic != self._allowed_topic:",
        "tests/wire/test_access_streams.py::test_right_that_is_withdrawn_for_a_topic_ends_batches_of_an_open_produce_stream",
    ),
    "a change while a file is read is not seen": Mutant(
        "broker/rpc/watched_file.py",
        '        self._stamps = [_stamp(path) for path in self._paths]\n        """Of the files that the value was made of."""\n        self._told: list[_Stamp] | None = None\n        """Of those that could not be used, once that was told."""\n        self.value = make()',
        "        self._told: list[_Stamp] | None = None\n        self.value = make()\n        self._stamps = [_stamp(path) for path in self._paths]",
        "tests/unit/rpc/test_watched_file.py::test_change_while_the_first_value_is_made_is_seen_at_the_next_look",
    ),
    "a batch leaves without the lease": Mutant(
        "broker/rpc/session.py",
        "            if self._owns() and (batch := consumer.next_nowait()) is not None:",
        "            if (batch := consumer.next_nowait()) is not None:",
        "tests/unit/rpc/test_told_without_lease.py::test_a_batch_that_was_handed_out_waits_in_its_outbox",
    ),
    "a stream ends before its acks are confirmed": Mutant(
        "broker/rpc/session.py",
        "            if finished and not (self._in_flight or self._answers or self._claims):",
        "            if finished and not (self._answers or self._claims):",
        "tests/wire/test_subscribe.py::test_acks_under_way_at_a_half_close_are_confirmed_before_the_stream_ends",
    ),
    "what is left as the broker leaves counts as an attempt": Mutant(
        "broker/rpc/session.py",
        "        self._subscription.consumers.drain(self._consumer)\n        self._consumer.hands_back = True\n        self._answer(",
        "        self._subscription.consumers.drain(self._consumer)\n        self._answer(",
        "tests/wire/test_attempts.py::test_what_counts_as_an_attempt",
    ),
    "answers take no room": Mutant(
        "broker/rpc/session.py",
        "                place = await self._unread.take(len(raw) + self._failures_bytes_max(raw))",
        "                place = await self._unread.take(len(raw))",
        "tests/wire/test_unread_answers.py::test_answers_that_are_not_read_are_bounded",
    ),
    "a turn is kept for ever": Mutant(
        "broker/rpc/reception.py",
        "        self._turns.give_back(place)\n\n\nclass BegunCall",
        "        self._beginning.discard(place)\n\n\nclass BegunCall",
        "tests/unit/rpc/test_turns.py::test_calls_of_a_connection_share_its_turn",
    ),
    "a freed turn goes to the greedy again": Mutant(
        "broker/rpc/reception.py",
        "            self._end(greedy)\n            self._queue.move_to_end(place.peer, last=False)",
        "            self._end(greedy)",
        "tests/unit/rpc/test_turns.py::test_a_turn_that_was_taken_from_a_connection_is_not_its_own_again",
    ),
    "a stream holds any number of bytes": Mutant(
        "broker/rpc/unread.py",
        "        return len(self) >= FRAMES_MAX or self._bytes.total() + bytes_ > self._rooms.stream_bytes_max",
        "        return len(self) >= FRAMES_MAX",
        "tests/wire/test_unread_answers.py::test_answers_that_are_not_read_are_bounded",
    ),
    "who leaves as room comes keeps it": Mutant(
        "broker/rpc/unread.py",
        "            self.give(bytes_ if waiter.got.done() and not waiter.got.cancelled() else 0)",
        "            self.give(0)",
        "tests/unit/rpc/test_unread.py::test_who_leaves_as_room_comes_gives_it_back",
    ),
    "a round of the loop gives out all room": Mutant(
        "broker/rpc/unread.py",
        "        self._left -= bytes_",
        "        self._left -= 0",
        "tests/unit/rpc/test_unread.py::test_a_round_of_the_loop_gives_out_a_bounded_amount",
    ),
    "one connection has the queue for itself": Mutant(
        "broker/rpc/fair_queue.py",
        "            self._items.move_to_end(peer)",
        "            self._items.move_to_end(peer, last=False)",
        "tests/unit/rpc/test_unread.py::test_connections_get_room_in_turn",
    ),
    "small answers take no room": Mutant(
        "broker/rpc/unread.py",
        "        return self._left > 0 and (not self.held or self.held + bytes_ <= self.bytes_max)",
        "        return self._left > 0 and (bytes_ <= SMALL_BYTES or not self.held or self.held + bytes_ <= self.bytes_max)",
        "tests/unit/rpc/test_unread.py::test_small_frames_have_a_room_of_their_own_that_is_bounded",
    ),
    "as few are ended as the first who waits needs": Mutant(
        "broker/rpc/unread.py",
        "        missing = self.held + self.waiting_bytes - self.bytes_max",
        "        missing = self.held + self._queue.first().bytes - self.bytes_max",
        "tests/unit/rpc/test_unread.py::test_as_many_are_ended_as_all_who_wait_need",
    ),
    "requests that wait for room are not counted": Mutant(
        "broker/rpc/unread.py",
        "        if self._calls_bytes + request_bytes > CALLS_BYTES_MAX:",
        "        if request_bytes > CALLS_BYTES_MAX:",
        "tests/unit/rpc/test_unread.py::test_requests_of_calls_that_wait_are_bounded",
    ),
    "batches that wait for their client take no room": Mutant(
        "broker/subscriptions/handout.py",
        "        if fitting and consumer.room is not None:",
        "        if fitting and consumer.room is None:",
        "tests/wire/test_unread_deliveries.py::test_messages_that_are_not_read_are_bounded",
    ),
    "room that no batch takes is kept": Mutant(
        "broker/rpc/batch_room.py",
        "            place.release()",
        "            place.shrink(1 << 62)",
        "tests/unit/rpc/test_batch_room.py::test_room_that_nobody_uses_is_given_up",
    ),
    "the head of a request has no end": Mutant(
        "broker/web/connections.py",
        "        return head_bytes <= HEAD_BYTES_MAX",
        "        return True",
        "tests/unit/web/test_connections.py::test_a_head_without_end_is_cut",
    ),
    "libraries log all that strangers send": Mutant(
        "broker/observe/logs.py",
        "        if minute.lines >= LIBRARY_LINES_MAX:",
        "        if minute.lines >= 1 << 62:",
        "tests/unit/observe/test_logs.py::test_a_library_that_logs_what_strangers_send_is_bounded",
    ),
    "clients need no certificate": Mutant(
        "broker/rpc/tls.py",
        "            require_client_authentication=bool(self._config.tls_client_ca_file),",
        "            require_client_authentication=False,",
        "tests/wire/test_tls.py::test_client_certificates_are_asked_for_and_checked",
    ),
    "a certificate serves before its time": Mutant(
        "broker/rpc/tls.py",
        "    if not certificate.not_valid_before_utc <= now < certificate.not_valid_after_utc:",
        "    if not now < certificate.not_valid_after_utc:",
        "tests/wire/test_tls.py::test_broker_does_not_start_with_files_that_cannot_be_used",
    ),
    "what a proxy passes on comes from this machine": Mutant(
        "broker/web/guard.py",
        "        is_passed_on = any(name in headers for name in _FORWARDING_HEADERS)",
        "        is_passed_on = all(name in headers for name in _FORWARDING_HEADERS)",
        "tests/unit/web/test_guard.py::test_reading_is_open_on_this_machine_only",
    ),
    "tokens are guessed from many addresses": Mutant(
        "broker/web/guard.py",
        "            self._failures_of_all.append(now_ns)\n",
        "",
        "tests/unit/web/test_guard.py::test_guessing_has_to_wait_from_one_address_and_from_many",
    ),
    "a form of a sister site is ours": Mutant(
        "broker/web/guard.py",
        '    if site is not None and site != "same-origin":',
        '    if site is not None and site == "cross-site":',
        "tests/unit/web/test_guard.py::test_forms_come_from_our_own_pages",
    ),
    "a login leads elsewhere": Mutant(
        "broker/web/site.py",
        '    is_ours = path.startswith("/") and not path.startswith(("//", "/\\\\")) and path.isprintable()',
        '    is_ours = path.startswith("/") and not path.startswith("//") and path.isprintable()',
        "tests/unit/web/test_guard.py::test_redirects_stay_here",
    ),
    "a frozen shard is waited for twice": Mutant(
        "broker/shards/node_supervisor.py",
        "            await self._wait_end({child.number: running[child.number]})",
        "            await asyncio.wait([running[child.number]], timeout=process_stop_seconds(self._config))",
        "tests/unit/shards/test_node_supervisor.py"
        "::test_an_owner_that_is_frozen_is_waited_for_once_when_its_node_stops",
    ),
    "a shard is handed over before the one before has an owner": Mutant(
        "broker/shards/node_supervisor.py",
        "            await self._wait_owner(child.number)",
        "            pass",
        "tests/unit/shards/test_node_supervisor.py"
        "::test_a_shard_is_handed_over_once_the_one_before_has_another_owner",
    ),
    "a process that has ended follows its shard": Mutant(
        "broker/shards/node_supervisor.py",
        "._replace(progress=(), applied_time_ms=0)",
        "._replace(progress=())",
        "tests/unit/shards/test_node_supervisor.py::test_a_process_that_has_ended_follows_nothing",
    ),
    "silence of a shard counts with answers in between": Mutant(
        "broker/shards/supervisor.py",
        "silent_looks + 1 if readiness.is_silent else 0",
        "silent_looks + readiness.is_silent",
        "tests/unit/shards/test_node_supervisor.py::test_silence_counts_if_there_was_no_answer_in_between",
    ),
    "a shard that stops is killed for its silence": Mutant(
        "broker/shards/supervisor.py",
        " == child.starts and not self._stop.is_set()",
        " == child.starts",
        "tests/unit/shards/test_node_supervisor.py::test_a_process_that_stops_is_not_killed_for_its_silence",
    ),
    "a shard is handed over to who has not read of the owner": Mutant(
        "broker/rpc/hand_over.py",
        'metadata=(*_token(), (DIRECT, "1"))',
        "metadata=_token()",
        "tests/wire/test_node_fronts.py"
        "::test_a_shard_is_handed_over_to_a_node_whose_own_process_has_read_of_the_owner",
    ),
    "nodes pass a call back and forth": Mutant(
        "broker/rpc/shard_owners.py",
        "        if connections is None or (is_direct and not is_here):",
        "        if connections is None:",
        "tests/wire/test_node_fronts.py::test_who_asks_for_the_owner_alone_is_told_where_it_is",
    ),
    "new shards of a cluster lie on one node": Mutant(
        "broker/node/placement.py",
        "        first = next(node for node in order if firsts[node] == fewest)",
        "        first = min(order)",
        "tests/unit/node/test_placement.py::test_shards_that_nobody_has_owned_are_spread_as_evenly_as_can_be",
    ),
    "shards that gave the same ids are put together": Mutant(
        "broker/folder/reshard.py",
        "        [ledger.ledger_id for topic in topics for ledger in topic.ledgers],\n",
        "",
        "tests/unit/folder/test_reshard.py::test_either_kind_of_ids_alone_is_refused",
    ),
    "a reshard that was cut stays cut": Mutant(
        "broker/folder/reshard.py",
        "            settle_shard_folders(vfs, root)\n            shards = read_shards(vfs, root)",
        "            shards = read_shards(vfs, root)",
        "tests/unit/folder/test_reshard.py::test_the_command_finishes_what_was_cut_once_all_was_made",
    ),
    "a shard that may have been there was away": Mutant(
        "broker/folder/reshard.py",
        "        return Alive(0)",
        "        return None",
        "tests/unit/folder/test_reshard.py"
        "::test_a_damaged_record_of_absences_is_of_a_shard_that_may_always_have_been_there",
    ),
    "damage passes for a shard that was never started": Mutant(
        "broker/storage/layout.py",
        "    return not any(list_if_there(vfs, folder) for folder in (layout.journal, layout.topics))",
        "    return True",
        "tests/jobs/test_shards.py::test_a_shard_that_lost_its_root_manifest_is_damaged_and_not_unused",
    ),
    "partitions pass a limit of all": Mutant(
        "clients/python/postdate/_inbox.py",
        "                inbox.finish()",
        "                pass",
        "tests/wire/test_sdk_partitions.py"
        "::test_a_limit_is_for_all_partitions_and_what_was_sent_beyond_it_goes_back_uncounted",
    ),
    "a connection that a front shares is closed for one client": Mutant(
        "broker/rpc/unread_clients.py",
        "    if not _TAG.fullmatch(tag):\n",
        "    if tag or not _TAG.fullmatch(tag):\n",
        "tests/wire/test_unread_behind_front.py::test_the_connection_of_a_standby_outlives_a_client_that_does_not_read",
    ),
    "who says that it is a front is never closed": Mutant(
        "broker/rpc/unread_clients.py",
        "call_later(FRONT_SECONDS, _close, peer)",
        "call_later(1e9, _close, peer)",
        "tests/unit/rpc/test_unread_clients.py::test_who_only_says_that_it_is_a_front_gains_a_few_seconds",
    ),
    "a connection is looked for once a call": Mutant(
        "broker/rpc/unread_clients.py",
        "    if peer is None or peer in _closing:\n",
        "    if peer is None:\n",
        "tests/unit/rpc/test_unread_clients.py::test_a_connection_without_a_tag_is_closed_at_once_and_once",
    ),
    "young answers are cut first": Mutant(
        "broker/rpc/forward.py",
        "(answer.since_ns <= late or ",
        "(True or ",
        "tests/wire/test_front.py::test_answers_that_stalled_give_way_first_then_calls_then_young_answers",
    ),
    "calls that the loop has not seen yet are refused at random": Mutant(
        "broker/rpc/port.py",
        '    "grpc.server.max_pending_requests": 10_000,\n    "grpc.server.max_pending_requests_hard_limit": 10_000,\n',
        "",
        "tests/wire/test_server_options.py::test_calls_that_arrive_while_the_broker_is_busy_are_not_refused",
    ),
    "reasons of all subscriptions have no bound": Mutant(
        "broker/subscriptions/decisions.py",
        'entries, text if room else "")',
        "entries, text)",
        "tests/unit/topics/test_limits.py::test_reasons_of_nacks_of_all_subscriptions_are_bounded",
    ),
    "the limit of open files is not raised": Mutant(
        "broker/runtime/descriptors.py",
        "        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))",
        "        pass",
        "tests/unit/runtime/test_descriptors.py::test_the_limit_is_raised_to_what_the_system_allows",
    ),
    "connections take the last descriptors from files": Mutant(
        "broker/runtime/spare_files.py",
        "            return self._open_with_spare(path, flags, error)",
        "            raise",
        "tests/unit/runtime/test_vfs.py::test_files_open_with_spares_while_no_descriptors_are_left_and_spares_come_back",
    ),
    "a file that is opened with a spare is everybody's": Mutant(
        "broker/runtime/spare_files.py",
        "                return os.open(path, flags, 0o600)",
        "                return os.open(path, flags, 0o644)",
        "tests/unit/runtime/test_vfs.py::test_files_open_with_spares_while_no_descriptors_are_left_and_spares_come_back",
    ),
    "silence on a connection lasts for ever": Mutant(
        "broker/rpc/port.py",
        '    "grpc.max_connection_idle_ms": 300_000,\n',
        "",
        "tests/wire/test_server_options.py::test_connections_without_calls_are_closed",
    ),
    "reclaim ends with a visit that could record nothing": Mutant(
        "broker/folder/retention.py",
        "                with contextlib.suppress(Unavailable):\n                    self._visit(topic)",
        "                self._visit(topic)",
        "tests/unit/folder/test_retention_races.py::test_reclaim_goes_on_after_a_visit_that_could_record_nothing",
    ),
    "a file of tokens is everybody's, and nothing is said": Mutant(
        "broker/rpc/access.py",
        "    if config.tokens_file and os.stat(config.tokens_file).st_mode & stat.S_IROTH:",
        "    if False:",
        "tests/unit/rpc/test_access_files.py::test_a_file_of_tokens_that_every_user_can_read_is_told",
    ),
    "a configuration with secrets is everybody's": Mutant(
        "broker/config.py",
        "    if secrets and os.stat(path).st_mode & stat.S_IROTH:",
        "    if False:",
        "tests/unit/test_config.py::test_secrets_are_never_shown",
    ),
    "rights that were withdrawn stay after a read that failed": Mutant(
        "broker/rpc/watched_file.py",
        "        try:\n            self.value = self._make()",
        "        self._stamps = stamps\n        try:\n            self.value = self._make()",
        "tests/unit/rpc/test_watched_file.py::test_change_that_could_not_be_read_in_passing_is_taken_at_the_next_look",
    ),
    "what waits for the journal takes nothing of the reserve": Mutant(
        "broker/folder/broker.py",
        "self.journal.appended_bytes + self.journal.pending_bytes - self._appended_at_look",
        "self.journal.appended_bytes - self._appended_at_look",
        "tests/unit/topics/test_limits.py::test_what_was_accepted_and_is_not_on_the_disk_yet_counts",
    ),
    "subscriptions on their way do not count": Mutant(
        "broker/topics/topic_subscriptions.py",
        " for subscription in self._by_id.values()} | self._creating.keys()",
        " for subscription in self._by_id.values()}",
        "tests/unit/topics/test_limits.py::test_a_limit_counts_what_is_under_way",
    ),
    "metrics answer to foreign names": Mutant(
        "broker/web/application.py",
        "        if is_foreign(request):\n            return _line(421, _FOREIGN)\n        return web.Response(body=await render",
        "        return web.Response(body=await render",
        "tests/unit/web/test_pages.py::test_another_host_name_gets_nothing_but_machines_do",
    ),
    "pages are open beside access control": Mutant(
        "broker/web/guard.py",
        "        return self._is_open and not is_passed_on",
        "        return not is_passed_on",
        "tests/unit/web/test_guard.py::test_reading_is_open_on_this_machine_only",
    ),
    "one damaged message stops a batch": Mutant(
        "broker/subscriptions/handout.py",
        "                salvaged = await read_around_damage(log, ledger_id, entry_ids, bytes_max)",
        "                raise",
        "tests/wire/test_damage.py::test_a_damaged_message_is_set_aside_and_its_stream_goes_on",
    ),
    "what is settled while it waits to be sent is read": Mutant(
        "broker/subscriptions/handout.py",
        "        settled = self._subscription.cursor.settled_mask(ledger_id, entry_ids)\n",
        "        settled = None\n",
        "tests/unit/topics/test_damage.py::test_what_is_settled_while_it_waits_to_be_sent_is_not_read",
    ),
    "a damaged message is set aside although it was settled meanwhile": Mutant(
        "broker/subscriptions/damage.py",
        "entry_ids[salvaged.damaged & ~refused]",
        "entry_ids[salvaged.damaged]",
        "tests/unit/topics/test_damage.py::test_a_damaged_message_that_is_settled_while_it_is_read_is_not_set_aside",
    ),
    "what was settled meanwhile is said to stay pending": Mutant(
        "broker/subscriptions/damage.py",
        "entry_ids[salvaged.unreadable & ~refused]",
        "entry_ids[salvaged.unreadable]",
        "tests/unit/topics/test_damage.py::test_a_message_that_cannot_be_read_and_is_settled_meanwhile_is_not_said_to_stay_pending",
    ),
    "what cannot be read is put off in silence": Mutant(
        "broker/subscriptions/damage.py",
        '    log.error(\n        "Messages cannot be read',
        '    log.debug(\n        "Messages cannot be read',
        "tests/unit/topics/test_damage.py::test_a_message_that_cannot_be_read_and_is_settled_meanwhile_is_not_said_to_stay_pending",
    ),
    "who manages a subscription may delete its topic": Mutant(
        "broker/rpc/access_rules.py",
        '        "DeleteTopic": _topic(_MANAGE',
        '        "DeleteTopic": _shown(_MANAGE',
        "tests/wire/test_access_table.py::test_real_calls_are_answered_as_the_table_says",
    ),
    "backups are open to who has subscriptions of all topics": Mutant(
        "broker/rpc/access_grants.py",
        "            return self.is_for_all_topics and self.subscriptions is None\n        assert",
        "            return self.is_for_all_topics\n        assert",
        "tests/wire/test_access_table.py::test_subscriptions_of_every_topic_are_no_topics",
    ),
    "a grant for one subscription reaches the others": Mutant(
        "broker/rpc/access_grants.py",
        "        if self.subscriptions is None or ask.subscription is SubscriptionScope.ANY:",
        "        if self.subscriptions is None or ask.subscription is not None:",
        "tests/wire/test_access_table.py::test_grants_reach_no_other_topic_and_no_other_subscription",
    ),
    "questions to another node end in silence": Mutant(
        "broker/rpc/peers.py",
        '            spawn_lasting(f"questions to node {node}", self._ask_again(node, address))',
        "            asyncio.ensure_future(self._ask_again(node, address))",
        "tests/unit/node/test_node.py::test_a_node_ends_loudly_where_a_task_of_its_own_fails",
    ),
    "a page looks at all that is loaded": Mutant(
        "broker/delayed/scan.py",
        "_PART_ROWS = 4_096",
        "_PART_ROWS = 1 << 30",
        "tests/unit/delayed/test_scan.py::test_a_page_of_one_millisecond_in_memory_costs_what_it_shows",
    ),
    "a page looks at all that is not sealed": Mutant(
        "broker/delayed/bucket_tracker.py",
        "unsorted_in_memory(bucket.blocks_between(waiting_from, end))",
        "unsorted_in_memory([bucket.waiting_between(waiting_from, end)])",
        "tests/unit/delayed/test_scan.py::test_a_page_of_one_millisecond_in_memory_costs_what_it_shows",
    ),
    "the last descriptors of the machine are no lack": Mutant(
        "broker/runtime/spare_files.py",
        "frozenset({errno.EMFILE, errno.ENFILE})",
        "frozenset({errno.EMFILE})",
        "tests/unit/runtime/test_vfs.py::test_files_open_with_spares_while_no_descriptors_are_left_and_spares_come_back",
    ),
    "moves to and fro add to an expiry without end": Mutant(
        "broker/storage/ledger_facts.py",
        "min(self.last_expire_ms + later_ms, EXPIRE_MS_MAX) if",
        "(self.last_expire_ms + later_ms) if",
        "tests/unit/topics/test_bounds.py::test_no_row_of_moves_brings_a_ledgers_expiry_out_of_its_type",
    ),
    "a sum beyond its type cannot be written": Mutant(
        "broker/storage/manifest.py",
        "last_expire_ms=min(facts.last_expire_ms, EXPIRE_MS_MAX),",
        "last_expire_ms=facts.last_expire_ms,",
        "tests/unit/topics/test_bounds.py::test_whatever_a_sum_came_to_a_manifest_is_written",
    ),
    "a sum of an older broker is taken as it is": Mutant(
        "broker/storage/manifest.py",
        "min(checked_time(entry.last_expire_ms), EXPIRE_MS_MAX),",
        "checked_time(entry.last_expire_ms),",
        "tests/unit/topics/test_bounds.py::test_a_sum_that_a_manifest_holds_from_before_is_read_as_the_greatest_expiry",
    ),
    "HTTP connections have no bound": Mutant(
        "broker/web/connections.py",
        "        if len(self._all) >= self._limit:",
        "        if len(self._all) >= 1 << 62:",
        "tests/unit/web/test_connections.py::test_beyond_the_limit_the_one_that_waited_longest_gives_its_place",
    ),
    "HTTP headers take any time": Mutant(
        "broker/web/connections.py",
        "        self._wait(connection, self._timeouts.headers_seconds)\n",
        "        self._wait(connection, 1e9)\n",
        "tests/unit/web/test_connections.py::test_who_does_not_finish_the_headers_is_cut",
    ),
    "an HTTP connection may say nothing for ever": Mutant(
        "broker/web/connections.py",
        "            self._wait(connection, self._timeouts.idle_seconds)\n",
        "            self._wait(connection, 1e9)\n",
        "tests/unit/web/test_connections.py::test_who_asks_nothing_more_is_cut",
    ),
    "a handshake takes any time": Mutant(
        "broker/rpc/port.py",
        '    "grpc.server_handshake_timeout_ms": 5_000,\n',
        "",
        "tests/wire/test_server_options.py::test_connections_that_begin_no_handshake_are_closed",
    ),
    "frozen peers stay": Mutant(
        "broker/rpc/port.py",
        '    "grpc.keepalive_time_ms": 20_000,\n',
        "",
        "tests/wire/test_server_options.py::test_frozen_peers_are_noticed",
    ),
    "a connection has any number of streams": Mutant(
        "broker/rpc/port.py",
        '    "grpc.max_concurrent_streams": 250,  # of one connection\n',
        "",
        "tests/wire/test_server_options.py::test_streams_of_one_connection_are_bounded",
    ),
    "a first message may come at any time": Mutant(
        "broker/rpc/reception.py",
        '        self.give_way(\n            LimitReached(f"No message',
        '        str(\n            LimitReached(f"No message',
        "tests/wire/test_reception.py::test_every_method_ends_a_call_that_sends_no_message",
    ),
    "probes wait for the turns of calls": Mutant(
        "broker/rpc/reception.py",
        "(CallKind.PROBE, _PROBES_MAX, probe_turns)",
        "(CallKind.PROBE, _PROBES_MAX, turns)",
        "tests/wire/test_reception.py::test_a_flood_on_more_connections_than_turns_keeps_nobody_out",
    ),
    "files that cannot be opened end writing": Mutant(
        "broker/runtime/patience.py",
        "    return isinstance(error, OSError) and not isinstance(error, (WriteFailed, *_NAMES_CHANGED))",
        "    return False",
        "tests/crash/test_storage_faults.py::test_what_failed_before_a_byte_was_written_is_done_again_and_nobody_is_refused",
    ),
    "bytes in doubt are written again": Mutant(
        "broker/runtime/patience.py",
        "not isinstance(error, (WriteFailed, *_NAMES_CHANGED))",
        "not isinstance(error, _NAMES_CHANGED)",
        "tests/crash/test_storage_faults.py::test_the_first_failure_ends_writing_and_nobody_is_answered_wrongly",
    ),
    "a task that fails stops nobody": Mutant(
        "broker/runtime/supervise.py",
        "                self._on_failure(name, error)\n",
        "                pass\n",
        "tests/unit/runtime/test_supervise.py::test_a_failure_is_logged_with_its_name_and_stops_the_broker_once",
    ),
    "a task that lasts may return": Mutant(
        "broker/runtime/supervise.py",
        "if is_lasting else None",
        "if False else None",
        "tests/unit/runtime/test_supervise.py::test_a_lasting_task_that_returns_and_one_that_nobody_cancelled_are_failures",
    ),
    "one failed read ends reclaim": Mutant(
        "broker/folder/retention.py",
        "                except (OSError, PostdateError) as error:\n                    # It stays",
        "                except NotFound as error:\n                    # It stays",
        "tests/unit/folder/test_retention_races.py::test_one_failed_read_ends_neither_reclaim_nor_the_broker",
    ),
}
