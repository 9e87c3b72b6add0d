from google.rpc import status_pb2 as _status_pb2
from postdate_api.v1 import message_pb2 as _message_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProduceRequest(_message.Message):
    __slots__ = ("topic", "messages", "producer_name", "request_id", "replace", "join_answers")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    JOIN_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    messages: _containers.RepeatedCompositeFieldContainer[_message_pb2.Message]
    producer_name: str
    request_id: int
    replace: bool
    join_answers: bool
    def __init__(self, topic: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_message_pb2.Message, _Mapping[str, object]]]] = ..., producer_name: _Optional[str] = ..., request_id: _Optional[int] = ..., replace: bool = ..., join_answers: bool = ...) -> None: ...

class ProduceResponse(_message.Message):
    __slots__ = ("request_id", "ids", "publish_time_ms", "error", "answers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    ids: _containers.RepeatedCompositeFieldContainer[_message_pb2.IdRange]
    publish_time_ms: int
    error: _status_pb2.Status
    answers: _containers.RepeatedCompositeFieldContainer[ProduceResponse]
    def __init__(self, request_id: _Optional[int] = ..., ids: _Optional[_Iterable[_Union[_message_pb2.IdRange, _Mapping[str, object]]]] = ..., publish_time_ms: _Optional[int] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping[str, object]]] = ..., answers: _Optional[_Iterable[_Union[ProduceResponse, _Mapping[str, object]]]] = ...) -> None: ...
