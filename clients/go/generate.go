// Package postdate is an example of a client of Postdate in Go: a producer, and a worker on a stream.
package postdate

//go:generate sh -c "protoc -I ../../protos -I ../../third_party --plugin=$(go tool -n protoc-gen-go) --plugin=$(go tool -n protoc-gen-go-grpc) --go_out=. --go_opt=module=postdate.dev/go --go-grpc_out=. --go-grpc_opt=module=postdate.dev/go postdate/v1/message.proto postdate/v1/producer.proto postdate/v1/consumer.proto"
