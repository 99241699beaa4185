//! The routes, and the document that describes their input, answers and required roles.

use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use utoipa::{
    Modify, OpenApi, ToSchema,
    openapi::{
        ContentBuilder, OpenApi as Document, RefOr, ResponseBuilder,
        path::Operation,
        security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme},
    },
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    Api, archive, audit, auth::ROLE_KEY, changes, consumer_changes, consumers, databases,
    deployments, doctor, edit, endpoints, erase, error::ProblemDetails, export, handlers, horizon,
    hosts, inbox, ingress, jobs, lag, migrations, outgoing, readiness, replays, retention, seek,
    shadows, storage, stores, tenant_changes, tenant_moves, tenants, tokens, unmask, verifications,
    versions, whoami,
};

/// Returns the routes and their document. A route that is missing here does not exist.
pub(crate) fn routes() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(show))
        .routes(routes!(whoami::show))
        .routes(routes!(tenants::list, tenants::create))
        .routes(routes!(tenants::show, tenant_changes::delete))
        .routes(routes!(tenant_changes::suspend))
        .routes(routes!(tenant_changes::resume))
        .routes(routes!(tenant_changes::limit))
        .routes(routes!(tenant_changes::rotate))
        .routes(routes!(tenant_moves::show, tenant_moves::begin, tenant_moves::cancel))
        .routes(routes!(migrations::list, migrations::apply))
        .routes(routes!(stores::list))
        .routes(routes!(stores::set, stores::delete))
        .routes(routes!(endpoints::list))
        .routes(routes!(endpoints::show, endpoints::set, endpoints::remove))
        .routes(routes!(endpoints::rotate))
        .routes(routes!(endpoints::test))
        .routes(routes!(consumers::list, consumers::create))
        .routes(routes!(consumers::show, consumer_changes::delete))
        .routes(routes!(consumer_changes::set_policy))
        .routes(routes!(consumer_changes::pause))
        .routes(routes!(consumer_changes::resume))
        .routes(routes!(consumer_changes::drain))
        .routes(routes!(seek::seek, seek::cancel))
        .routes(routes!(horizon::show))
        .routes(routes!(lag::show))
        .routes(routes!(readiness::show))
        .routes(routes!(handlers::list))
        .routes(routes!(versions::list))
        .routes(routes!(versions::show, versions::upload))
        .routes(routes!(versions::diff))
        .routes(routes!(verifications::list, verifications::attest))
        .routes(routes!(deployments::list, changes::deploy))
        .routes(routes!(deployments::show, changes::set_percent))
        .routes(routes!(changes::promote))
        .routes(routes!(changes::end))
        .routes(routes!(changes::start_canary))
        .routes(routes!(changes::start_shadow))
        .routes(routes!(changes::roll_back))
        .routes(routes!(shadows::differences))
        .routes(routes!(ingress::show, ingress::set, ingress::remove))
        .routes(routes!(ingress::rotate))
        .merge(messages())
        .routes(routes!(tokens::list, tokens::create))
        .routes(routes!(tokens::revoke))
        .routes(routes!(tokens::list_of_tenant, tokens::create_of_tenant))
        .routes(routes!(tokens::revoke_of_tenant))
        .routes(routes!(audit::list))
        .routes(routes!(audit::list_of_tenant))
        .routes(routes!(databases::list))
        .routes(routes!(hosts::list))
        .routes(routes!(doctor::show))
        .routes(routes!(retention::show))
        .routes(routes!(retention::run))
        .routes(routes!(archive::show, archive::end))
        .routes(routes!(archive::forget))
        .routes(routes!(archive::list))
        .routes(routes!(archive::find))
        .routes(routes!(storage::show))
        .routes(routes!(storage::show_of_tenant))
}

/// Returns the routes of messages and of what is done with many of them.
fn messages() -> OpenApiRouter<Api> {
    OpenApiRouter::new()
        .routes(routes!(inbox::list))
        .routes(routes!(inbox::show))
        .routes(routes!(inbox::history))
        .routes(routes!(inbox::backlog))
        .routes(routes!(export::export))
        .routes(routes!(edit::edit))
        .routes(routes!(unmask::unmask))
        .routes(routes!(erase::erase))
        .routes(routes!(outgoing::list))
        .routes(routes!(outgoing::show))
        .routes(routes!(outgoing::stats))
        .routes(routes!(jobs::list, jobs::start))
        .routes(routes!(jobs::estimate))
        .routes(routes!(jobs::show))
        .routes(routes!(jobs::pause))
        .routes(routes!(jobs::resume))
        .routes(routes!(jobs::cancel))
        .routes(routes!(replays::plan))
        .routes(routes!(replays::start))
        .routes(routes!(replays::list))
        .routes(routes!(replays::show))
        .routes(routes!(replays::pause))
        .routes(routes!(replays::resume))
        .routes(routes!(replays::cancel))
}

/// Returns the document, with the additions that all operations have.
pub fn document() -> Document {
    let mut document = routes().into_openapi();
    Common.modify(&mut document);
    document
}

/// Show this document
#[utoipa::path(get, path = "/openapi.json", tag = "document", responses((status = 200, body = Object)),
    extensions(("x-role" = json!("none"))))]
async fn show() -> Response {
    static TEXT: std::sync::LazyLock<String> =
        std::sync::LazyLock::new(|| document().to_json().expect("it is made of plain values"));
    ([(header::CONTENT_TYPE, "application/json")], TEXT.as_str()).into_response()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Oncebox",
        description = "Everything a person can do with Oncebox. Each operation says in `x-role` \
            what it asks for: `none`, `any` token, or a \
            token of that role or a higher one (viewer, operator, deployer, admin). A token of a \
            tenant reaches the paths of that tenant. \
            `platform` asks for an admin's token that is of no tenant.",
        license(name = "MIT OR Apache-2.0")
    ),
    components(schemas(ProblemDetails))
)]
struct Head;

/// The additions to every operation: an id, the form of refusals, and the token.
struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        let components = document.components.get_or_insert_default();
        let scheme =
            HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("obx_").build();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
        for (path, item) in &mut document.paths.paths {
            let all = [
                ("get", &mut item.get),
                ("put", &mut item.put),
                ("post", &mut item.post),
                ("patch", &mut item.patch),
                ("delete", &mut item.delete),
            ];
            for (method, operation) in all {
                if let Some(operation) = operation {
                    complete(method, path, operation);
                }
            }
        }
    }
}

fn complete(method: &str, path: &str, operation: &mut Operation) {
    // The id is unique, and stable as long as the path is.
    let words = path
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty() && *word != "v1");
    operation.operation_id = Some(words.fold(method.to_owned(), |id, word| id + "_" + word));
    let problem = ContentBuilder::new()
        .schema(Some(utoipa::openapi::Ref::from_schema_name(ProblemDetails::name())))
        .build();
    let refused = ResponseBuilder::new()
        .description("Refused")
        .content("application/problem+json", problem)
        .build();
    operation.responses.responses.insert("default".to_owned(), RefOr::T(refused));
    let is_public = operation
        .extensions
        .as_ref()
        .and_then(|e| e.get(ROLE_KEY))
        .is_some_and(|role| role == "none");
    operation.security = Some(if is_public {
        vec![SecurityRequirement::default()]
    } else {
        vec![SecurityRequirement::new("token", [""; 0])]
    });
}
