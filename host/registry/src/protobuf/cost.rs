//! Cost of a message, computed before it is decoded.
//!
//! One byte on the wire may become a value of fifty bytes in memory, or a message whose thousand
//! fields are all visited. An `Any` may hold an `Any`, each decoded with a stack of its own.

use prost_reflect::{FieldDescriptor, Kind, MessageDescriptor};

/// Most values of a message, those of inner messages included.
const VALUES_MAX: usize = 1_000_000;
/// Most visits of fields of descriptors.
const FIELD_VISITS_MAX: usize = 5_000_000;
/// Deepest nesting of messages, those in an `Any` included. The decoder has this limit too, but not
/// for `Any`.
const DEPTH_MAX: usize = 100;
const ANY: &str = "google.protobuf.Any";

/// Refuses a message that costs more than the bounds. The error is the reason, with its position.
pub(super) fn check(descriptor: &MessageDescriptor, message: &[u8]) -> Result<(), String> {
    let mut cost = MessageCost { values: 0, field_visits: 0, path: Vec::new() };
    let place =
        |cost: &MessageCost| cost.path.iter().map(|name| format!("/{name}")).collect::<String>();
    let mut rest = message;
    cost.message(Some(descriptor), &mut rest, None)
        .map_err(|why| format!("{why} at `{}`", place(&cost)))
}

/// Reads a number of at most ten bytes.
pub(super) fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, behind) = rest.split_first()?;
        *rest = behind;
        if shift == 63 && *byte > 1 {
            return None;
        }
        number |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The cost of a message, counted so far.
struct MessageCost {
    values: usize,
    field_visits: usize,
    /// Names of the fields around the current position, as in the schema.
    path: Vec<String>,
}

impl MessageCost {
    fn values(&mut self, more: usize) -> Result<(), String> {
        self.values += more;
        if self.values > VALUES_MAX {
            Err(format!("it has more than {VALUES_MAX} values"))
        } else {
            Ok(())
        }
    }

    fn field_visits(&mut self, more: usize) -> Result<(), String> {
        self.field_visits += more;
        if self.field_visits > FIELD_VISITS_MAX {
            Err("it has too many messages for the number of their fields".to_owned())
        } else {
            Ok(())
        }
    }

    fn enter(&mut self, name: &str) -> Result<(), String> {
        self.path.push(name.to_owned());
        if self.path.len() >= DEPTH_MAX {
            Err(format!("it is nested more than {DEPTH_MAX} deep"))
        } else {
            Ok(())
        }
    }

    /// Counts a message up to its end, or up to the end of its group. An unknown group has no
    /// descriptor.
    fn message(
        &mut self,
        descriptor: Option<&MessageDescriptor>,
        rest: &mut &[u8],
        group: Option<u64>,
    ) -> Result<(), String> {
        self.values(1)?;
        self.field_visits(descriptor.map_or(0, |descriptor| descriptor.fields().len()))?;
        let mut any = descriptor
            .filter(|descriptor| descriptor.full_name() == ANY)
            .map(|_| (None, Vec::new()));
        while !rest.is_empty() {
            let key = varint(rest).ok_or("a field has no number")?;
            let number = key >> 3;
            let field = u32::try_from(number).ok().and_then(|number| descriptor?.get_field(number));
            if let Some(oneof) = field.as_ref().and_then(|field| field.containing_oneof()) {
                self.field_visits(oneof.fields().len())?;
            }
            match key & 7 {
                0 => {
                    varint(rest).ok_or("a number is cut off, or has more than 64 bits")?;
                    self.values(1)?;
                }
                1 => self.fixed(rest, 8)?,
                2 => {
                    let bytes = length_delimited(rest)?;
                    match (&mut any, number) {
                        (Some((url, _)), 1) => *url = Some(bytes),
                        (Some((_, values)), 2) => values.push(bytes),
                        _ => {}
                    }
                    self.delimited(field.as_ref(), bytes)?;
                }
                3 => {
                    self.enter(field.as_ref().map_or("*", |field| field.name()))?;
                    let kind = field.map(|field| field.kind());
                    self.message(kind.as_ref().and_then(Kind::as_message), rest, Some(number))?;
                    self.path.pop();
                }
                4 if group == Some(number) => return Ok(()),
                5 => self.fixed(rest, 4)?,
                _ => return Err("a field is encoded in no way that there is".to_owned()),
            }
        }
        if group.is_some() {
            return Err("a group has no end".to_owned());
        }
        match (any, descriptor) {
            (Some((url, values)), Some(descriptor)) => {
                self.any(descriptor, url.unwrap_or_default(), &values)
            }
            _ => Ok(()),
        }
    }

    fn fixed(&mut self, rest: &mut &[u8], size: usize) -> Result<(), String> {
        (_, *rest) = rest.split_at_checked(size).ok_or("it ends too early")?;
        self.values(1)
    }

    fn delimited(
        &mut self,
        field: Option<&FieldDescriptor>,
        mut bytes: &[u8],
    ) -> Result<(), String> {
        let Some(field) = field else { return self.values(1) };
        match field.kind() {
            Kind::Message(message) => {
                self.enter(field.name())?;
                self.message(Some(&message), &mut bytes, None)?;
                self.path.pop();
                Ok(())
            }
            Kind::String | Kind::Bytes => self.values(1),
            Kind::Double | Kind::Fixed64 | Kind::Sfixed64 => self.values(1 + bytes.len() / 8),
            Kind::Float | Kind::Fixed32 | Kind::Sfixed32 => self.values(1 + bytes.len() / 4),
            // Each packed number ends with a byte whose first bit is 0.
            _ => self.values(1 + bytes.iter().filter(|byte| **byte < 0x80).count()),
        }
    }

    /// Counts every value of an `Any` by the last type that it names. The decoder keeps the last
    /// value.
    fn any(
        &mut self,
        descriptor: &MessageDescriptor,
        url: &[u8],
        values: &[&[u8]],
    ) -> Result<(), String> {
        let name =
            url.rsplit(|byte| *byte == b'/').next().and_then(|name| std::str::from_utf8(name).ok());
        let message = name.and_then(|name| descriptor.parent_pool().get_message_by_name(name));
        let message = message
            .ok_or("an `Any` is of a type that is neither in its schema nor imported there")?;
        self.enter("value")?;
        values.iter().try_for_each(|value| self.message(Some(&message), &mut &**value, None))?;
        self.path.pop();
        Ok(())
    }
}

fn length_delimited<'m>(rest: &mut &'m [u8]) -> Result<&'m [u8], String> {
    let length = varint(rest)
        .and_then(|length| usize::try_from(length).ok())
        .ok_or("a length is cut off")?;
    let (bytes, behind) = rest.split_at_checked(length).ok_or("it ends too early")?;
    *rest = behind;
    Ok(bytes)
}
