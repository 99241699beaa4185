//! Uploads of components from a form.

use std::time::Duration;

use axum::{
    extract::{FromRequest, FromRequestParts, Multipart, Request, State, multipart::Field},
    http::StatusCode,
    response::{IntoResponse, Redirect, Response},
};
use bytes::{Bytes, BytesMut};
use oncebox_api::{
    link::path,
    wire::{Role, VersionBody},
};
use sha2::{Digest, Sha256};
use tokio::sync::SemaphorePermit;

use crate::{
    fields::Fields, form::check, html::of_tenant, layout::refused, refusal::Refusal,
    state::Console, visit::Visit,
};

/// Largest text of a field that is no file, bytes.
const FIELD_BYTES_MAX: usize = 4_096;

/// Largest number of these.
const FIELDS_MAX: usize = 8;

/// Longest pause within an upload.
const PAUSE_MAX: Duration = Duration::from_secs(15);

/// Receives a component, and shows the versions of its handler.
pub(crate) async fn receive(State(console): State<Console>, request: Request) -> Response {
    let (mut parts, body) = request.into_parts();
    let visit = match Visit::from_request_parts(&mut parts, &console).await {
        Ok(visit) => visit,
        Err(response) => return response,
    };
    let head = parts.clone();
    let received = async {
        let request = Request::from_parts(parts, body);
        let form = Multipart::from_request(request, &()).await;
        let form = form.map_err(|error| Refusal::invalid(error.body_text()))?;
        if !visit.may(Role::Deployer, false) {
            let detail = "an upload needs the role deployer";
            return Err(Refusal::new(StatusCode::FORBIDDEN, detail));
        }
        let (fields, file, _room) =
            read(&console, form, |fields| check(&visit, &head, fields)).await?;
        let (tenant, handler) = (fields.need("tenant")?, fields.need("handler")?);
        let digest = hex::encode(Sha256::digest(&file));
        let at = path(&["tenants", tenant, "handlers", handler, "versions", &digest]);
        visit.client.upload::<VersionBody>(&at, file).await?;
        Ok(of_tenant(tenant, &["handlers", handler]))
    };
    match received.await {
        Ok(page) => Redirect::to(&page).into_response(),
        Err(refusal) => refused(Some(&visit), &refusal),
    }
}

/// Reads a form. Its file comes last, and is read only where the fields before it pass the check and
/// there is room for it in memory.
async fn read<'a>(
    console: &'a Console,
    mut form: Multipart,
    passes: impl Fn(&Fields) -> Result<(), Refusal>,
) -> Result<(Fields, Bytes, SemaphorePermit<'a>), Refusal> {
    let broken = |_| Refusal::invalid("the form broke off, or is none");
    let mut fields = Fields::default();
    while let Some(field) = within(form.next_field()).await?.map_err(broken)? {
        let name = field.name().unwrap_or_default().to_owned();
        if name == "file" {
            passes(&fields)?;
            if fields.get("handler").is_none() {
                let file = field.file_name().unwrap_or_default();
                let stem = file.strip_suffix(".wasm").unwrap_or(file).to_owned();
                fields.0.push(("handler".to_owned(), stem));
            }
            let room = console.0.uploads.acquire().await;
            let room = room.map_err(|_| Refusal::invalid("the host ends"))?;
            let file = content(field, console.0.api.component_bytes_max()).await?;
            return Ok((fields, file, room));
        }
        if fields.0.len() == FIELDS_MAX {
            return Err(Refusal::invalid("the form has more fields than the page"));
        }
        let value = content(field, FIELD_BYTES_MAX).await?;
        fields.0.push((name, String::from_utf8_lossy(&value).into_owned()));
    }
    Err(Refusal::invalid("no file was chosen; choose a component"))
}

async fn content(mut field: Field<'_>, bytes_max: usize) -> Result<Bytes, Refusal> {
    let mut content = BytesMut::new();
    let broken = |_| Refusal::invalid("the form broke off");
    while let Some(chunk) = within(field.chunk()).await?.map_err(broken)? {
        if content.len() + chunk.len() > bytes_max {
            let name = field.name().unwrap_or_default();
            let detail =
                format!("`{name}` has more than {bytes_max} bytes, which is what is taken");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        content.extend_from_slice(&chunk);
    }
    Ok(content.freeze())
}

/// Waits for the next part of an upload, no longer than a client may pause.
async fn within<T>(part: impl Future<Output = T>) -> Result<T, Refusal> {
    let part = tokio::time::timeout(PAUSE_MAX, part).await;
    part.map_err(|_| Refusal::new(StatusCode::REQUEST_TIMEOUT, "the upload stood still"))
}
