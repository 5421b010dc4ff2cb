//! Texts with places to fill in: `/v1/charges?ref={/order_id}&key={key}`.
//!
//! A place is a JSON pointer into the operation's payload (`{/order_id}`), or one of the names `{operation_id}` and
//! `{key}` (the key that the downstream gets). `{{` and `}}` are braces.

/// A JSON pointer (RFC 6901).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pointer(String);

/// A text with places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Literal(String),
    OperationId,
    Key,
    Payload(Pointer),
}
