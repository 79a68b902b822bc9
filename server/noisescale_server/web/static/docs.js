// The API's own description, drawn by Swagger UI.

const place = document.getElementById("docs");
window.SwaggerUIBundle({ url: place.dataset.document, domNode: place, deepLinking: true, validatorUrl: null });
